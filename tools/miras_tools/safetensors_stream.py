"""safetensors files written one tensor at a time, in shards with an index.

    8 bytes    length of the header, little endian
    header     JSON: {"__metadata__": {..}, name: {"dtype", "shape", "data_offsets"}}, spaces to a multiple of 8
    data       the tensors, without gaps

The library's own writer wants a whole shard in memory. Reading is the library's.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

FLOAT_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
"""What the format calls the dtypes of weights."""

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Entry:
    """One tensor to be written: its name there, its dtype and its shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_shards(
    folder: Path, entries: Sequence[Entry], tensor_of: Callable[[str], Tensor], max_bytes: int
) -> list[str]:
    """Write `entries` to `folder`, in files of at most `max_bytes` (a larger tensor has one of its own); their names.

    tensor_of   name -> the tensor, called once for each, in the order of the files
    Raises OSError where the disk doesn't take it.
    """
    shards = plan_shards(entries, max_bytes)
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    for name, shard in zip(names, shards, strict=True):
        write_file(folder / name, shard, tensor_of)
    if count > 1:
        index = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        total = {"total_size": sum(entry.nbytes for entry in entries)}
        content = json.dumps({"metadata": total, "weight_map": dict(sorted(index.items()))}, indent=2)
        (folder / INDEX).write_text(content + "\n", encoding="utf-8")
    return names


def plan_shards(entries: Sequence[Entry], max_bytes: int) -> list[list[Entry]]:
    """The entries in their order, cut where a file would grow beyond `max_bytes`."""
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    return shards


def write_file(path: Path, entries: Sequence[Entry], tensor_of: Callable[[str], Tensor]) -> None:
    """One file, down to the disk. Wide dtypes first, so that every tensor lies at a multiple of its width."""
    ordered = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))
    with open(path, "wb") as file:
        file.write(_header(ordered))
        for entry in ordered:
            _write_data(file, entry, tensor_of(entry.name))
        file.flush()
        os.fsync(file.fileno())


def _header(entries: Sequence[Entry]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in entries:
        offsets = [start, start + entry.nbytes]
        header[entry.name] = {"dtype": FLOAT_CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        start += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_data(file: BinaryIO, entry: Entry, tensor: Tensor) -> None:
    assert (tensor.dtype, tuple(tensor.shape)) == (entry.dtype, entry.shape), entry.name
    data: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    file.write(data)
