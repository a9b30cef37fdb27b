"""The folders of checkpoints as files: names, the atomic rename, `latest`, and the manifest.

    RUN/checkpoints/step_00000500/   complete, or it would not have this name
        manifest.json                format version, step, bytes and SHA-256 of every other file
        config.yaml                  the resolved configuration
        common.pt                    plain values and tensors: read through an allow-list
        .metadata  __0_0.distcp ..   megatron-core's dist_checkpointing (torch_dist)
    RUN/checkpoints/latest           the name of the newest; a resumed run starts there

What is in the tensors is `checkpoint`'s business, what may be read of pickled files `plain_files`'.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .atomic_write import write_atomically
from .signs import alive

FORMAT = 1
"""Version of everything written here; a reader refuses a newer one."""

MANIFEST, LATEST = "manifest.json", "latest"

OWN_NAME = re.compile(r"step_\d{8,}")
"""Of a checkpoint that a run has made; a copy under another name is its user's, and isn't counted or removed."""

UNREAD = "can't be read"

BLOCK = 1 << 22
"""bytes of a file that are read at once"""

NEEDED = (".metadata", "common.pt", "config.yaml")
"""Files of every checkpoint, beside those of the tensors, __*; a manifest that leaves one out checks nothing."""


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
    """Bytes and SHA-256 of one file. Every block is a sign of life: a file of a large model takes minutes."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            alive()
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


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
        raise damaged(folder, MANIFEST, "is missing") from None
    except OSError as e:
        raise unread(folder / MANIFEST, e) from None
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise damaged(folder, MANIFEST, f"can't be read ({type(e).__name__})") from None
    if version > FORMAT:
        raise ValueError(
            f"{folder}: checkpoint format {version}, this version reads up to {FORMAT}; update miras-megatron"
        )
    if digest is not None and digest != _digest(manifest):
        raise damaged(folder, MANIFEST, "has changed since it was written")
    _refuse_gaps(folder, manifest["files"])
    return manifest


def _refuse_gaps(folder: Path, files: dict[str, Any]) -> None:
    """Raise ValueError where a manifest of our own format names no file to compare, or nothing to compare it with."""
    for name, entry in files.items():
        if not isinstance(entry, dict) or not {"bytes", "sha256"} <= entry.keys():
            raise damaged(folder, MANIFEST, f"doesn't say what {name} was when it was written")
    missing = [name for name in NEEDED if name not in files]
    missing += [] if any(name.startswith("__") for name in files) else ["__0_0.distcp"]
    if missing:
        raise damaged(folder, MANIFEST, f"doesn't name {', '.join(missing)}")


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
        else:
            problems += _changed(path, want["sha256"])
    return problems


def _changed(path: Path, digest: str) -> list[str]:
    try:
        changed = describe(path)["sha256"] != digest
    except OSError as error:
        return [str(unread(path, error))]
    return [f"{path} has changed since it was written (SHA-256 differs)"] if changed else []


def unread(path: Path, error: OSError) -> ValueError:
    """The error that tells of a file which the system doesn't let us read: of what is in it that says nothing."""
    return ValueError(f"{path} {UNREAD} ({error.strerror or error}); mend that and try again")


def refuse_damaged(folder: Path, problems: list[str]) -> None:
    """Raise ValueError for what `damaged_files` found on any rank."""
    unread_files = sorted(problem for problem in problems if UNREAD in problem)
    if unread_files:
        raise ValueError("; ".join(unread_files))
    if problems:
        raise ValueError("damaged checkpoint: " + "; ".join(sorted(problems)) + f"; {_way_out(folder)}")


def _way_out(folder: Path) -> str:
    others = [path.name for path in complete_checkpoints(folder.parent.parent) if path != folder]
    if not others:
        return "there is no earlier one"
    return f"go on from an earlier one with --resume {folder.parent / others[-1]}"


def damaged(folder: Path, name: str, reason: str) -> ValueError:
    """The error that tells of a damaged file, and of the checkpoint to go on from."""
    return ValueError(f"damaged checkpoint: {folder / name} {reason}; {_way_out(folder)}")
