"""Writes Megatron's PREFIX.bin / PREFIX.idx pair document by document, byte for byte as megatron-core's builder does.

An own writer because megatron-core's needs torch in every preprocessing worker and keeps its index in Python lists.
Here a document costs four bytes of memory, and its tokens may come in pieces.

.idx  9-byte magic, u64 version, u8 dtype code, u64 sequences, u64 documents + 1, i32 lengths, i64 byte offsets,
      i64 document indices; all little endian. One sequence is one document.
.bin  the tokens, nothing else.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

MAGIC = b"MMIDIDX\x00\x00"
HEADER_BYTES = 34
LONGEST_DOCUMENT = 2**31 - 1
DTYPES: dict[int, type[np.integer]] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 below 65,500 ids, int32 from there on: megatron-core's own choice."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


class PairWriter:
    """Appends documents to PREFIX.bin; `close` writes PREFIX.idx. A `with` block that fails removes both."""

    def __init__(self, prefix: str | Path, dtype: np.dtype, *, skip_empty: bool = False) -> None:
        """skip_empty: leave documents without a token out of the index."""
        self.prefix = str(prefix)
        self.dtype = dtype
        self.skip_empty = skip_empty
        self.lengths = array("i")
        self._file: BinaryIO = open(self.prefix + ".bin", "wb")

    def add(self, pieces: Iterable[NDArray[np.integer]]) -> int:
        """Write one document given in pieces; returns its length in tokens, which fits a signed 32-bit number."""
        length = 0
        for piece in pieces:
            self._file.write(np.ascontiguousarray(piece, dtype=self.dtype).data)
            length += piece.size
        if length > LONGEST_DOCUMENT:
            raise ValueError(f"a document of {length:,} tokens: .idx files hold lengths below 2^31; split the document")
        if length or not self.skip_empty:
            self.lengths.append(length)
        return length

    def close(self) -> None:
        """Flush the tokens to the disk and write the index."""
        sync_and_close(self._file)
        write_index(self.prefix + ".idx", self.dtype, np.frombuffer(self.lengths, dtype=np.int32))

    def __enter__(self) -> PairWriter:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            return self.close()
        self._file.close()
        for ending in (".bin", ".idx"):
            Path(self.prefix + ending).unlink(missing_ok=True)


def write_index(path: str | Path, dtype: np.dtype, lengths: NDArray[np.int32]) -> None:
    """Write an .idx of documents with one sequence each; lengths int32 [documents], in tokens."""
    code = next(code for code, kind in DTYPES.items() if np.dtype(kind) == dtype)
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    offsets = ends - lengths.astype(np.int64) * dtype.itemsize
    with open(path, "wb") as file:
        file.write(MAGIC + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1))
        file.write(np.ascontiguousarray(lengths, dtype="<i4").data)
        file.write(np.ascontiguousarray(offsets, dtype="<i8").data)
        file.write(np.arange(len(lengths) + 1, dtype="<i8").data)
        file.flush()
        os.fsync(file.fileno())


def sync_and_close(file: BinaryIO) -> None:
    """Close a file whose bytes are on the disk, so that a rename after it never shows an empty file."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
