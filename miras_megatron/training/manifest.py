"""The manifest beside a .bin / .idx pair: by which tokenizer it was cut, what is in it, and what its files hash to.

PREFIX.bin, PREFIX.idx       Megatron's pair, PREFIX ending in _text_document
PREFIX.loss_mask.{bin,idx}   the same documents as uint8, 1 where predicting the token counts; only with prompts
PREFIX.manifest.json         this file, written last: where it is, the pair is whole
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from .atomic_write import write_atomically

FORMAT = "miras-data"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What PREFIX.manifest.json says; every number is of the whole set."""

    tokenizer: str
    """name: "bytes" or the file it came from"""
    tokenizer_digest: str
    """sha256 of everything that decides ids"""
    vocab_size: int
    eod: int
    appends_eod: bool
    """every document ends with the eod id"""
    dtype: str
    documents: int
    tokens: int
    """eods included"""
    text_bytes: int
    """UTF-8 bytes of the documents"""
    empty_documents: int = 0
    """left out because they held no text"""
    largest_token: int = -1
    loss_mask: bool = False
    """PREFIX.loss_mask.bin and .idx are there"""
    histogram: dict[str, int] = field(default_factory=dict)
    """documents by length: "64" counts those of 64 to 127 tokens"""
    sources: list[dict[str, str | int]] = field(default_factory=list)
    """path, bytes and documents of every file read, in order"""
    files: dict[str, dict[str, str | int]] = field(default_factory=dict)
    """ending -> bytes and sha256"""
    plan: str = ""
    """sha256 of inputs and settings: equal plans give equal bytes"""


def manifest_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.manifest.json")


def write_manifest(prefix: str | Path, manifest: Manifest) -> None:
    """Write the manifest beside `prefix` by an atomic rename."""
    text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(manifest)}, indent=1, ensure_ascii=False)
    write_atomically(manifest_path(prefix), text + "\n")


def read_manifest(prefix: str | Path) -> Manifest | None:
    """The manifest beside `prefix`; None where there is none. Raises ValueError naming a file that is no manifest."""
    path = manifest_path(prefix)
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT or content["version"] != VERSION:
            raise ValueError(f"format {content['format']!r} version {content['version']!r}")
        return Manifest(**{entry.name: content[entry.name] for entry in fields(Manifest)})
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"not a manifest of {FORMAT} version {VERSION} ({error})"
        raise ValueError(
            f"{path}: {reason}; run miras-preprocess again, or remove it to read the pair unchecked"
        ) from None


def describe_file(path: str | Path) -> dict[str, str | int]:
    """Size and sha256 of a file, read in pieces of a MiB."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return {"bytes": os.path.getsize(path), "sha256": digest.hexdigest()}
