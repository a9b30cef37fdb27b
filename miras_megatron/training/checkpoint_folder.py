"""The folders of checkpoints as files: names, the atomic rename, `latest`, the manifest, and what may be unpickled.

    RUN/checkpoints/step_00000500/   complete, or it would not have this name
        manifest.json                format version, step, bytes and SHA-256 of every other file
        config.yaml                  the resolved configuration
        common.pt                    plain values and tensors: read through an allow-list
        .metadata  __0_0.distcp ..   megatron-core's dist_checkpointing (torch_dist)
    RUN/checkpoints/latest           the name of the newest; a resumed run starts there

What is in the tensors is `checkpoint`'s business. A reader unpickles nothing but tensors, plain values
and the few classes of `METADATA_CLASSES`, so a checkpoint from a stranger can't run code.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from .manifest import write_atomically as write_atomically

Index = dict[str, TensorStorageMetadata]
"""Tensor name -> its shape, dtype and parts."""

Places = dict[MetadataIndex, Any]
"""Part of a tensor -> torch's _StorageInfo: file, offset and length of what torch.save wrote."""

FORMAT = 1
"""Version of everything written here; a reader refuses a newer one."""

MANIFEST, LATEST = "manifest.json", "latest"

NEEDED = (".metadata", "common.pt", "config.yaml")
"""Files of every checkpoint, beside those of the tensors, __*; a manifest that leaves one out checks nothing."""

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


def folder_of(run_dir: Path | str) -> Path:
    """Where the checkpoints of a run lie."""
    return Path(run_dir) / "checkpoints"


def name_of(step: int) -> str:
    """Folder name of the checkpoint after `step`."""
    return f"step_{step:08d}"


def complete_checkpoints(run_dir: Path | str) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    folder = folder_of(run_dir)
    return sorted(path.parent for path in folder.glob(f"step_*/{MANIFEST}")) if folder.is_dir() else []


def latest_checkpoint(run_dir: Path | str) -> Path | None:
    """The checkpoint that `latest` names, else the newest complete one, else None.

    One that is there but lost its manifest is damaged: whoever reads it is told, instead of going on from an older one.
    """
    folder = folder_of(run_dir)
    named = folder / _named_latest(folder)
    if named != folder and named.is_dir():
        return named
    found = complete_checkpoints(run_dir)
    return found[-1] if found else None


def _named_latest(folder: Path) -> str:
    """The name in `latest`; empty where there is none: the pointer is a convenience, whatever became of it."""
    try:
        with open(folder / LATEST, encoding="utf-8") as file:
            name = file.read(64).strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return name if re.fullmatch(r"step_\d+", name) else ""


def find_checkpoint(path: Path | str, field: str) -> Path:
    """The checkpoint that a user named: a checkpoint folder, or a run folder, which stands for its latest.

    Raises ValueError naming `field` where there is none.
    """
    path = Path(path)
    if (path / MANIFEST).is_file():
        return path
    found = latest_checkpoint(path)
    if found is None:
        reason = "holds no complete checkpoint" if path.is_dir() else "does not exist"
        raise ValueError(
            f"{field} = {path}: {reason}; name a run folder with checkpoints/ or one checkpoints/step_* in it"
        )
    return found


def begin_checkpoint(run_dir: Path | str, step: int, rank: int, barrier: Callable[[], None]) -> Path:
    """The hidden folder that the checkpoint of `step` is written into. What a killed save left behind is removed.

    Every rank calls it; `barrier` is called where ranks wait for rank 0.
    """
    folder, part = folder_of(run_dir), part_of(run_dir, step)
    if rank == 0:
        for left_behind in folder.glob(".step_*"):
            shutil.rmtree(left_behind)
        part.mkdir(parents=True)
    barrier()
    return part


def complete_checkpoint(run_dir: Path | str, step: int, rank: int, barrier: Callable[[], None]) -> Path:
    """Give the written checkpoint of `step` its name and make it `latest`. Every rank calls it."""
    folder, target = folder_of(run_dir), folder_of(run_dir) / name_of(step)
    barrier()
    if rank == 0:
        retire(target)
        os.rename(part_of(run_dir, step), target)
        _sync_folder(folder)
        write_atomically(folder / LATEST, target.name + "\n")
        _sync_folder(folder)
    barrier()
    return target


def part_of(run_dir: Path | str, step: int) -> Path:
    """The hidden folder of a checkpoint that isn't complete."""
    return folder_of(run_dir) / f".{name_of(step)}.part"


def keep_newest(run_dir: Path | str, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints (0: none), never the latest."""
    latest = latest_checkpoint(run_dir)
    for path in complete_checkpoints(run_dir)[: -keep or None] if keep else []:
        if path != latest:
            retire(path)


def retire(path: Path) -> None:
    """Remove a checkpoint so that a kill in the middle leaves no half one under a complete name."""
    if path.exists():
        gone = path.with_name(f".{path.name}.gone")
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(path, gone)
        shutil.rmtree(gone)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- the manifest ------------------------------------------------------------------------------------


def describe(path: Path) -> dict[str, Any]:
    """Bytes and SHA-256 of one file."""
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_manifest(folder: Path, step: int, files: dict[str, dict[str, Any]]) -> None:
    """Write the manifest over `files` (name -> `describe`)."""
    content = {"format": FORMAT, "step": step, "files": dict(sorted(files.items()))}
    write_atomically(folder / MANIFEST, json.dumps(content | {"sha256": _digest(content)}, indent=1))


def _digest(content: dict[str, Any]) -> str:
    """SHA-256 of what a manifest says, so that a flipped bit in it isn't blamed on another file."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest. Raises ValueError where it can't be read or is of a newer format."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        version = int(manifest["format"])
        if not isinstance(manifest["files"], dict):
            raise TypeError("files")
        digest = manifest.pop("sha256", None)  # older ones have none
    except FileNotFoundError:
        raise _damaged(folder, MANIFEST, "is missing") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        raise _damaged(folder, MANIFEST, f"can't be read ({type(e).__name__})") from None
    if version > FORMAT:
        raise ValueError(
            f"{folder}: checkpoint format {version}, this version reads up to {FORMAT}; update miras-megatron"
        )
    if digest is not None and digest != _digest(manifest):
        raise _damaged(folder, MANIFEST, "has changed since it was written")
    _refuse_gaps(folder, manifest["files"])
    return manifest


def _refuse_gaps(folder: Path, files: dict[str, Any]) -> None:
    """Raise ValueError where a manifest of our own format names no file to compare, or nothing to compare it with."""
    for name, entry in files.items():
        if not isinstance(entry, dict) or not {"bytes", "sha256"} <= entry.keys():
            raise _damaged(folder, MANIFEST, f"doesn't say what {name} was when it was written")
    missing = [name for name in NEEDED if name not in files]
    missing += [] if any(name.startswith("__") for name in files) else ["__0_0.distcp"]
    if missing:
        raise _damaged(folder, MANIFEST, f"doesn't name {', '.join(missing)}")


def damaged_files(folder: Path, part: int = 0, parts: int = 1) -> list[str]:
    """What is wrong with the files of a checkpoint, one line each; rank `part` of `parts` reads its share."""
    problems = []
    for index, (name, want) in enumerate(sorted(read_manifest(folder)["files"].items())):
        if index % parts != part:
            continue
        path = folder / name
        if Path(name).name != name or not path.is_file():
            problems.append(f"{path} is missing")
        elif path.stat().st_size != want["bytes"]:
            problems.append(f"{path} has {path.stat().st_size} bytes, {want['bytes']} were written")
        elif describe(path)["sha256"] != want["sha256"]:
            problems.append(f"{path} has changed since it was written (SHA-256 differs)")
    return problems


def refuse_damaged(folder: Path, problems: list[str]) -> None:
    """Raise ValueError for what `damaged_files` found on any rank."""
    if problems:
        raise ValueError("damaged checkpoint: " + "; ".join(sorted(problems)) + f"; {_way_out(folder)}")


def _way_out(folder: Path) -> str:
    others = [path.name for path in complete_checkpoints(folder.parent.parent) if path != folder]
    if not others:
        return "there is no earlier one"
    return f"go on from an earlier one with --resume {folder.parent / others[-1]}"


def _damaged(folder: Path, name: str, reason: str) -> ValueError:
    return ValueError(f"damaged checkpoint: {folder / name} {reason}; {_way_out(folder)}")


# -- what may be unpickled ---------------------------------------------------------------------------


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
    except Exception as e:  # what a changed byte makes of a pickle fails by whatever error comes
        raise _damaged(folder, ".metadata", f"can't be read: {str(e) or type(e).__name__}") from None
    held, places = (getattr(index, part, None) for part in ("state_dict_metadata", "storage_data"))
    if not isinstance(index, Metadata) or not isinstance(held, dict) or not isinstance(places or {}, dict):
        raise _damaged(folder, ".metadata", "is no index of tensors")
    tensors = {k: v for k, v in held.items() if isinstance(v, TensorStorageMetadata)}
    pickled = sorted(map(str, held.keys() - tensors.keys()))
    if pickled:
        raise ValueError(f"{folder}: {pickled[0]} is a pickled object, not a tensor; only tensors are read")
    bent = [str(name) for name, entry in tensors.items() if not _is_described(name, entry)]
    if bent:
        raise _damaged(folder, ".metadata", f"doesn't say what {bent[0]} is")
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
    with no_extra_globals():
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
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
