"""The unfinished state of a preprocessing run on disk, and its end: PREFIX.parts/ and how it becomes a pair.

plan.json      what the run is of; a run of something else is refused
tokenizer.json a BPE trained by this run
NNNNN.bin .idx .prompts, and .json written last: a unit that is done

Everything is written under a scratch name and renamed, so a kill leaves whole files only, and the same command goes on.
Units are joined in order, so the bytes hang neither on the number of workers nor on where a run was killed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from miras_megatron.training.atomic_write import write_atomically
from miras_megatron.training.token_writer import HEADER_BYTES, PairWriter, write_index
from miras_megatron.training.tokenizer import Tokenizer

from .encode import encode_pieces
from .text_sources import Document, Keys, Slice, read_documents

ENDINGS = (".bin", ".idx", ".loss_mask.bin", ".loss_mask.idx")


@dataclass
class Counts:
    """What was read; adds up over units."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    empty: int = 0
    largest_token: int = -1
    prompts: int = 0
    histogram: dict[int, int] = field(default_factory=dict)
    """power of two -> (documents of that length to twice it)"""
    histogram_tokens: dict[int, int] = field(default_factory=dict)
    by_source: dict[str, int] = field(default_factory=dict)

    def add_document(self, path: str, length: int, text_bytes: int, largest: int, has_prompt: bool) -> None:
        bucket = 1 << max(0, length.bit_length() - 1)
        self.documents += 1
        self.tokens += length
        self.text_bytes += text_bytes
        self.largest_token = max(self.largest_token, largest)
        self.prompts += has_prompt
        self.histogram[bucket] = self.histogram.get(bucket, 0) + 1
        self.histogram_tokens[bucket] = self.histogram_tokens.get(bucket, 0) + length
        self.by_source[path] = self.by_source.get(path, 0) + 1

    def add(self, other: Counts) -> None:
        for name in ("documents", "tokens", "text_bytes", "empty", "prompts"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.largest_token = max(self.largest_token, other.largest_token)
        for name in ("histogram", "histogram_tokens", "by_source"):
            mine, theirs = getattr(self, name), getattr(other, name)
            for key, value in theirs.items():
                mine[key] = mine.get(key, 0) + value

    @staticmethod
    def from_json(content: dict[str, Any]) -> Counts:
        counts = Counts(**content)
        counts.histogram = {int(key): value for key, value in counts.histogram.items()}
        counts.histogram_tokens = {int(key): value for key, value in counts.histogram_tokens.items()}
        return counts


def tokenise_unit(
    unit: tuple[Slice, ...], keys: Keys, tokenizer: Tokenizer, append_eod: bool, stem: str | None, dtype: np.dtype[Any]
) -> Counts:
    """Read and tokenise one unit; write its part files at `stem`, or nothing (None: a dry run)."""
    counts, prompts = Counts(), []
    scratch = None if stem is None else f"{stem}.{os.getpid()}.tmp"
    with _writer(scratch, dtype) as writer:
        for part in unit:
            for document in read_documents(part, keys):
                measured = _Measured(document, tokenizer, append_eod)
                length = writer.add(measured.ids()) if writer else sum(ids.size for ids in measured.ids())
                if length:
                    has_prompt = document.prompt is not None
                    counts.add_document(part.path, length, measured.text_bytes, measured.largest, has_prompt)
                    prompts.append(measured.prompt_length)
                else:
                    counts.empty += 1
    if stem is not None and scratch is not None:
        _store(stem, scratch, counts, prompts)
    return counts


class _Measured:
    """Ids of a document with its end mark, counted on the way; an empty document gives none."""

    def __init__(self, document: Document, tokenizer: Tokenizer, append_eod: bool) -> None:
        self._document, self._tokenizer, self._append_eod = document, tokenizer, append_eod
        self.text_bytes, self.prompt_length, self.largest = 0, 0, -1

    def ids(self) -> Iterator[NDArray[np.int64]]:
        prompt = [self._document.prompt] if self._document.prompt else []
        for ids in self._counted(prompt):
            self.prompt_length += ids.size
            yield ids
        yield from self._counted(self._document.pieces)
        if self._append_eod and self.text_bytes:
            self.largest = max(self.largest, self._tokenizer.eod)
            yield np.array([self._tokenizer.eod])

    def _counted(self, pieces: Iterable[str]) -> Iterator[NDArray[np.int64]]:
        for ids in encode_pieces(self._tokenizer, self._measure(pieces)):
            self.largest = max(self.largest, int(ids.max(initial=-1)))
            yield ids

    def _measure(self, pieces: Iterable[str]) -> Iterator[str]:
        for piece in pieces:
            # a lone surrogate takes three bytes so, like the U+FFFD that it becomes
            self.text_bytes += len(piece) if piece.isascii() else len(piece.encode("utf-8", "surrogatepass"))
            yield piece


@contextmanager
def _writer(scratch: str | None, dtype: np.dtype[Any]) -> Iterator[PairWriter | None]:
    if scratch is None:
        yield None
        return
    with PairWriter(scratch, dtype, skip_empty=True) as writer:
        yield writer


def _store(stem: str, scratch: str, counts: Counts, prompts: list[int]) -> None:
    """Give a unit's files their names; its .json, which says that it is done, last."""
    for ending in (".bin", ".idx"):
        os.replace(scratch + ending, stem + ending)
    if counts.prompts:
        np.array(prompts, dtype=np.int32).tofile(scratch)
        os.replace(scratch, stem + ".prompts")
    write_atomically(Path(stem + ".json"), json.dumps(asdict(counts)))


class Parts:
    """PREFIX.parts/, locked for this run."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.folder = Path(prefix + ".parts")
        self._lock: BinaryIO | None = None

    @property
    def begun(self) -> bool:
        """An earlier run left its plan here."""
        return (self.folder / "plan.json").exists()

    def open(self, plan: dict[str, Any]) -> bool:
        """Make or reopen the folder; True where an earlier run of the same plan is gone on with.

        Raises ValueError when the folder belongs to another plan or another process works in it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.folder / "lock", "ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{self.folder}: another miras-preprocess works there; wait for it or end it") from None
        path = self.folder / "plan.json"
        if not path.exists():
            write_atomically(path, json.dumps(plan, indent=1))
            return False
        before = json.loads(path.read_text(encoding="utf-8"))
        if differing := [key for key in plan if plan[key] != before.get(key)]:
            reason = f"an unfinished run with other {', '.join(differing)}"
            raise ValueError(f"{self.folder}: {reason}; repeat that command to finish it, or remove the folder")
        return True

    def stem(self, number: int) -> str:
        return str(self.folder / f"{number:05d}")

    def done(self, number: int) -> Counts | None:
        """Counts of a unit that is there, or None."""
        path = Path(self.stem(number) + ".json")
        return Counts.from_json(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None

    def join(self, units: int, dtype: np.dtype[Any], with_masks: bool) -> dict[str, dict[str, str | int]]:
        """Make the pair (and the masks) of all units' files; returns ending -> bytes, sha256."""
        scratch = str(self.folder / "whole")
        lengths = np.concatenate([_lengths(self.stem(number)) for number in range(units)])
        tokens = (piece for number in range(units) for piece in _bytes_of(self.stem(number)))
        files = {".bin": _concatenate(scratch + ".bin", tokens)}
        write_index(scratch + ".idx", dtype, lengths)
        if with_masks:
            masks = (mask for number in range(units) for mask in _masks(self.stem(number)))
            files[".loss_mask.bin"] = _concatenate(scratch + ".loss_mask.bin", masks)
            write_index(scratch + ".loss_mask.idx", np.dtype(np.uint8), lengths)
        for ending in ENDINGS:
            if Path(scratch + ending).exists():
                os.replace(scratch + ending, self.prefix + ending)
            else:
                Path(self.prefix + ending).unlink(missing_ok=True)
        return files

    def remove(self) -> None:
        """Drop the folder and everything in it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _lengths(stem: str) -> NDArray[np.int32]:
    count = (os.path.getsize(stem + ".idx") - HEADER_BYTES - 8) // 20
    return np.fromfile(stem + ".idx", dtype="<i4", offset=HEADER_BYTES, count=count)


def _bytes_of(stem: str) -> Iterator[bytes]:
    with open(stem + ".bin", "rb") as file:
        while piece := file.read(1 << 20):
            yield piece


def _masks(stem: str) -> Iterator[bytes]:
    """A byte a token: 0 for the tokens of prompts, 1 for all others."""
    lengths = _lengths(stem)
    prompts = np.fromfile(stem + ".prompts", np.int32) if Path(stem + ".prompts").exists() else np.zeros_like(lengths)
    for length, prompt in zip(lengths.tolist(), prompts.tolist(), strict=True):
        yield bytes(prompt) + b"\x01" * (length - prompt)


def _concatenate(path: str, pieces: Iterable[bytes]) -> dict[str, str | int]:
    digest, size = hashlib.sha256(), 0
    with open(path, "wb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}
