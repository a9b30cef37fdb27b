"""The public-domain English that ships with the package (miras_megatron/text), as token files for a first run."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

import numpy as np

from .lock import Held, take_lock
from .manifest import Manifest, describe_file, manifest_path, read_manifest, write_manifest
from .token_writer import PairWriter, token_dtype
from .tokenizer import ByteTokenizer, Tokenizer

TEXT = "austen.txt.gz"
BREAK = "\f"
"""stands between two documents (chapters) of the shipped text"""


def shipped_documents() -> list[str]:
    """The chapters of the shipped novels, in order."""
    packed = resources.files("miras_megatron").joinpath("text", TEXT).read_bytes()
    return gzip.decompress(packed).decode("utf-8").split(BREAK)


def prepare_shipped_text(
    folder: str | Path, tokenizer: Tokenizer | None = None, *, timeout: float = 120.0, field: str = "data.cache"
) -> str:
    """Token files of the shipped text in `folder`, made when absent; returns their prefix.

    Any number of processes, on any number of machines with or without a shared folder, may call this at once: the first
    to lock the folder writes, the others wait for it.

    tokenizer  bytes when None
    timeout    seconds to wait for another process
    field      the field that decides about the folder, for messages
    Raises TimeoutError naming the process that holds the lock, ValueError when the folder cannot be written.
    """
    tokenizer = tokenizer or ByteTokenizer()
    prefix = str(Path(folder) / f"shipped_{tokenizer.digest[:12]}_text_document")
    if manifest_path(prefix).exists():
        return prefix
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with _locked(Path(prefix + ".lock"), timeout):
            if read_manifest(prefix) is None:
                _write_documents(prefix, shipped_documents(), tokenizer)
    except OSError as error:
        if isinstance(error, TimeoutError):
            raise
        reason = error.strerror or error
        raise ValueError(f"{field}: {str(folder)!r} can't be written ({reason}); name another folder") from None
    return prefix


def _write_documents(prefix: str, documents: list[str], tokenizer: Tokenizer) -> None:
    """The pair under a scratch name, renamed when whole; the manifest last."""
    dtype = token_dtype(tokenizer.vocab_size)
    scratch = f"{prefix}.{os.getpid()}.tmp"
    largest = 0
    with PairWriter(scratch, dtype) as writer:
        for text in documents:
            ids = np.array([*tokenizer.encode(text), tokenizer.eod])
            largest = max(largest, int(ids.max()))
            writer.add([ids])
    for ending in (".bin", ".idx"):
        os.replace(scratch + ending, prefix + ending)
    write_manifest(
        prefix,
        Manifest(
            tokenizer=tokenizer.name,
            tokenizer_digest=tokenizer.digest,
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            appends_eod=True,
            dtype=dtype.name,
            documents=len(documents),
            tokens=sum(writer.lengths),
            text_bytes=sum(len(text.encode("utf-8")) for text in documents),
            largest_token=largest,
            files={ending: describe_file(prefix + ending) for ending in (".bin", ".idx")},
            plan="shipped",
        ),
    )


@contextmanager
def _locked(path: Path, timeout: float) -> Iterator[None]:
    """Hold the lock of `path`."""
    with open(path, "a+", encoding="utf-8") as file:
        try:
            take_lock(file, timeout)
        except Held as holder:
            raise TimeoutError(_waited(path, holder, timeout)) from None
        yield


def _waited(path: Path, holder: Held, timeout: float) -> str:
    reason = f"waited {timeout:g} s for {holder}, which holds {path}"
    return f"data.cache: {reason}; end that process, or name another folder in data.cache"
