"""Files of tensors and plain values, and torch's index of them: how they are written, and all that is unpickled.

That is tensors, plain values and the few classes of `METADATA_CLASSES`: a checkpoint from a stranger can't run code.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from .checkpoint_manifest import damaged, unread

Index = dict[str, TensorStorageMetadata]
"""Tensor name -> its shape, dtype and parts."""

Places = dict[MetadataIndex, Any]
"""Part of a tensor -> torch's _StorageInfo: file, offset and length of what torch.save wrote."""

METADATA_CLASSES = {
    "torch": {
        "Size",
        "device",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "bool",
    },
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.planner": {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "ChunkStorageMetadata",
        "TensorProperties",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}
"""Everything the index of a torch_dist checkpoint is made of; nothing else is unpickled from it."""


def _enum_member(kind: object, name: str) -> Any:
    """What stands in for `getattr`, by which Python 3.11.0 to 3.11.3 pickle members of an enumeration."""
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"getattr({kind!r}, {name!r}) is not allowed")


class _IndexReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if name in METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")


def read_index(folder: Path) -> Index:
    """Tensor name -> shape, dtype and places. Raises ValueError where it holds anything but tensors' shapes and places.

    torch reads this file with a plain `pickle.load` and byte objects with `weights_only=False`; so it is read
    here first, through an allow-list, and a checkpoint that holds byte objects at all is refused.
    """
    tensors, _ = read_places(folder)
    return tensors


def read_places(folder: Path) -> tuple[Index, Places]:
    """The index, and where in the files each part of a tensor lies. Raises ValueError as `read_index` does."""
    try:
        with open(folder / ".metadata", "rb") as file:
            index = _IndexReader(file).load()
    except FileNotFoundError:
        raise damaged(folder, ".metadata", "is missing") from None
    except OSError as e:
        raise unread(folder / ".metadata", e) from None
    except Exception as e:  # what a changed byte makes of a pickle fails by whatever error comes
        raise damaged(folder, ".metadata", f"can't be read: {str(e) or type(e).__name__}") from None
    held, places = (getattr(index, part, None) for part in ("state_dict_metadata", "storage_data"))
    if not isinstance(index, Metadata) or not isinstance(held, dict) or not isinstance(places or {}, dict):
        raise damaged(folder, ".metadata", "is no index of tensors")
    tensors = {k: v for k, v in held.items() if isinstance(v, TensorStorageMetadata)}
    pickled = sorted(map(str, held.keys() - tensors.keys()))
    if pickled:
        raise ValueError(f"{folder}: {pickled[0]} is a pickled object, not a tensor; only tensors are read")
    bent = [str(name) for name, entry in tensors.items() if not _is_described(name, entry)]
    if bent:
        raise damaged(folder, ".metadata", f"doesn't say what {bent[0]} is")
    return tensors, places or {}


def _is_described(name: object, entry: TensorStorageMetadata) -> bool:
    """Whether an entry of the index has what a reader of the tensor asks for; an unpickled one may lack anything."""
    try:
        corners = [corner for part in entry.chunks for corner in (part.offsets, part.sizes)]
        sized = all(isinstance(corner, tuple) and len(corner) == len(entry.size) for corner in [entry.size, *corners])
        return isinstance(name, str) and sized and isinstance(entry.properties.dtype, torch.dtype)
    except (AttributeError, TypeError):
        return False


def write_plain(path: Path, content: dict[str, Any]) -> None:
    """Write tensors and plain values, down to the disk. Raises OSError where the disk doesn't take them."""
    with open(path, "wb") as file:
        save_into(file, content)
        file.flush()
        os.fsync(file.fileno())


def save_into(file: IO[bytes], content: Any) -> None:
    """torch.save, which raises OSError where the disk is full."""
    with as_the_system_says():
        torch.save(content, file)


@contextmanager
def as_the_system_says() -> Iterator[None]:
    """Inside, torch.save raises OSError where the disk is full: its own complaint is of a position in a stream."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def read_plain(path: Path, allowed: tuple[str, ...]) -> dict[str, Any]:
    """A file of tensors and plain values, with no key but `allowed`. Raises ValueError naming what else it holds."""
    try:
        file = open(path, "rb")
    except OSError as e:
        raise unread(path, e) from None
    with file, no_extra_globals():
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as e:  # over a file of another kind torch's reader stumbles by whatever error comes
            first = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
            raise ValueError(f"{path}: can't be read as tensors and plain values: {first}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds a {type(content).__name__}, not named values")
    unknown = sorted(map(str, content.keys() - set(allowed)))
    if unknown:
        raise ValueError(f"{path}: unknown entries {', '.join(unknown)}; allowed are {', '.join(allowed)}")
    return content


@contextmanager
def no_extra_globals() -> Iterator[None]:
    """Inside, torch.load's allow-list is torch's own: megatron-core's import adds classes to it."""
    extra = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        yield
    finally:
        torch.serialization.add_safe_globals(extra)
