"""The folders of checkpoints: names, the atomic rename, `latest`, and which ones are kept.

    RUN/checkpoints/step_00000500/   complete, or it would not have this name
        manifest.json                format version, step, bytes and SHA-256 of every other file
        config.yaml                  the resolved configuration
        common.pt                    plain values and tensors: read through an allow-list
        .metadata  __0_0.distcp ..   megatron-core's dist_checkpointing (torch_dist)
    RUN/checkpoints/latest           the name of the newest; a resumed run starts there

The manifest is `checkpoint_manifest`'s, what is in the tensors `checkpoint`'s, what may be read of pickled files
`plain_files`' business.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from .atomic_write import write_beside

MANIFEST, LATEST = "manifest.json", "latest"

OWN_NAME = re.compile(r"step_\d{8,}")
"""Of a checkpoint that a run has made; a copy under another name is its user's, and isn't counted or removed."""


def folder_of(run_dir: Path | str) -> Path:
    """Where the checkpoints of a run lie."""
    return Path(run_dir) / "checkpoints"


def name_of(step: int) -> str:
    """Folder name of the checkpoint after `step`."""
    return f"step_{step:08d}"


def complete_checkpoints(run_dir: Path | str) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    folder = folder_of(run_dir)
    found = [path.parent for path in folder.glob(f"step_*/{MANIFEST}")] if folder.is_dir() else []
    return sorted(path for path in found if OWN_NAME.fullmatch(path.name))


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


def passed_over(run_dir: Path | str, start: Path) -> list[Path]:
    """The complete checkpoints of a run that are later than `start`, oldest first."""
    return [path for path in complete_checkpoints(run_dir) if path.name > start.name]


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
        for pointer in folder.glob(f"{LATEST}.*.tmp"):
            pointer.unlink(missing_ok=True)
        part.mkdir(parents=True)
    barrier()
    return part


def complete_checkpoint(run_dir: Path | str, step: int, rank: int, barrier: Callable[[], None]) -> Path:
    """Give the written checkpoint of `step` its name and make it `latest`, both or neither. Every rank calls it.

    Raises OSError where the disk doesn't take it. Only a kill between the two leaves one that `latest` doesn't name.
    """
    target = folder_of(run_dir) / name_of(step)
    barrier()
    if rank == 0:
        pointer = write_beside(target.with_name(LATEST), target.name + "\n")  # what needs room comes first
        retire(target)
        os.rename(part_of(run_dir, step), target)
        try:
            _sync_folder(target.parent)
            os.replace(pointer, target.with_name(LATEST))
        except OSError:
            os.rename(target, part_of(run_dir, step))
            raise
        _sync_folder(target.parent)
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
