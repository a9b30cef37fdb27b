"""The manifest of a checkpoint: what its files were when they were written, and what is wrong with them now.

manifest.json  format version, step, bytes and SHA-256 of every other file, and a SHA-256 of what it says itself
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from .atomic_write import write_atomically
from .checkpoint_folder import MANIFEST, complete_checkpoints
from .signs import alive

FORMAT = 1
"""Version of everything written here; a reader refuses a newer one."""

UNREAD = "can't be read"

BLOCK = 1 << 22
"""bytes of a file that are read at once"""

NEEDED = (".metadata", "common.pt", "config.yaml")
"""Files of every checkpoint, beside those of the tensors, __*; a manifest that leaves one out checks nothing."""


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
