"""A checkpoint's tensors one at a time, without a process group: read from it, or written as one.

torch's own reader wants the whole model allocated, its writer keeps all of it until the end. Here a tensor is read
from the bytes the index names, put together from the parts that ranks wrote, and nothing but tensors is unpickled.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from .plain_files import no_extra_globals, read_places, save_into

WEIGHTS_FILE = "__0_0.distcp"
NOT_WEIGHTS = ("optimizer.", "random.", "lane")
"""How the names of moments, random states and carried memory states begin."""


class StoredTensors:
    """The tensors of the checkpoint in `folder`, by their names; raises ValueError naming the file that is damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._index, self._places = read_places(folder)

    @property
    def names(self) -> list[str]:
        """Every tensor, moments and random states among them."""
        return list(self._index)

    @property
    def weights(self) -> list[str]:
        """The model's parameters."""
        return [name for name in self._index if not name.startswith(NOT_WEIGHTS)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor, over all ranks."""
        return tuple(self._index[name].size)

    def dtype(self, name: str) -> torch.dtype:
        """As it was trained."""
        return self._index[name].properties.dtype

    def nbytes(self, name: str) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape(name)) * self.dtype(name).itemsize

    def read(self, name: str) -> Tensor:
        """The whole tensor. Memory: itself, and the largest part of it where there are several."""
        parts = self._index[name].chunks
        if len(parts) == 1:
            return self._read_part(name, parts[0])
        if sum(math.prod(part.sizes) for part in parts) != math.prod(self.shape(name)):
            raise self._damaged(name, "its parts don't make up the tensor")
        whole = torch.empty(self.shape(name), dtype=self.dtype(name))
        for part in parts:
            whole[_slices(part)] = self._read_part(name, part)
        return whole

    def _read_part(self, name: str, part: ChunkStorageMetadata) -> Tensor:
        place = self._places.get(MetadataIndex(name, part.offsets))
        if place is None or Path(place.relative_path).name != place.relative_path:
            raise self._damaged(name, "the index doesn't say where it is")
        try:
            tensor = _load(self.folder / place.relative_path, place)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, ValueError) as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise self._damaged(name, f"{place.relative_path} can't be read ({first})") from None
        if not isinstance(tensor, Tensor) or (tensor.shape, tensor.dtype) != (part.sizes, self.dtype(name)):
            raise self._damaged(name, f"{place.relative_path} doesn't hold what the index says")
        return tensor

    def _damaged(self, name: str, reason: str) -> ValueError:
        return ValueError(f"damaged checkpoint: {self.folder}: {name}: {reason}; take an earlier one")


def write_tensors(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write (name, tensor) pairs as the tensors of a checkpoint of one rank, one at a time, down to the disk.

    Raises OSError where the disk doesn't take them.
    """
    described: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    with open(folder / WEIGHTS_FILE, "wb") as file:
        for name, tensor in tensors:
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, f"{name}: a view, saved with all it views"
            start, origin = file.tell(), torch.Size([0] * tensor.dim())
            save_into(file, tensor)
            places[MetadataIndex(name, origin, 0)] = _StorageInfo(WEIGHTS_FILE, start, file.tell() - start)
            chunk = ChunkStorageMetadata(offsets=origin, sizes=tensor.shape)
            described[name] = TensorStorageMetadata(
                TensorProperties.create_from_tensor(tensor), tensor.shape, chunks=[chunk]
            )
        _sync(file)
    with open(folder / ".metadata", "wb") as file:
        pickle.dump(Metadata(described, None, places, StorageMeta()), file)
        _sync(file)


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _load(path: Path, place: Any) -> Any:
    """What torch.save wrote at `place`; no other byte of the file is read."""
    if getattr(place, "transform_descriptors", None):
        raise ValueError("is transformed")
    with open(path, "rb") as file, no_extra_globals():
        view = cast(IO[bytes], _create_file_view(file, place.offset, place.length))
        return torch.load(view, map_location="cpu", weights_only=True)


def _slices(part: ChunkStorageMetadata) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(part.offsets, part.sizes, strict=True))
