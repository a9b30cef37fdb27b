"""Whose folder is it: a run never writes over another's, and knows where it goes on from before anything is built."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from stat import S_IFDIR, S_ISDIR
from typing import TextIO

from ..config.describe import dump_run
from ..config.load import load_file
from ..config.schema import Run, refused_on_resume
from .atomic_write import write_atomically
from .checkpoint_folder import find_checkpoint, folder_of, latest_checkpoint
from .lock import Held, take_lock

TRACES = ("config.yaml", "metrics.jsonl", "checkpoints")
"""What a run leaves in its folder."""

FILES = ("config.yaml", "metrics.jsonl", "validation.jsonl", "gradients.jsonl", "events.jsonl")
FOLDERS = ("checkpoints", "tb")
"""What a run opens in its folder without asking again."""

LOCK = ".lock"
PATIENCE = 5.0
"""seconds for a run that was just killed to let go of its folder"""

logger = logging.getLogger(__name__)


def find_start(run: Run) -> Path | None:
    """The checkpoint that the run goes on from; None: from step 0.

    Raises ValueError where run.dir holds another run, or the named checkpoint isn't there. Writes nothing.
    """
    folder, resume = Path(run.run.dir), run.checkpoint.resume
    _refuse_what_stands_in_the_way(folder)
    traces = [name for name in TRACES if (folder / name).exists()]
    if resume == "never":
        if traces:
            raise _occupied(folder, f"holds a run already ({', '.join(traces)}) and checkpoint.resume is never")
        return None
    if resume != "auto":
        named = find_checkpoint(resume, "checkpoint.resume")
        if traces and folder_of(folder).resolve() not in named.resolve().parents:
            raise _occupied(folder, f"holds another run than checkpoint.resume = {resume}")
        return named
    found = latest_checkpoint(folder)
    if found is None and (folder / "config.yaml").exists():
        _refuse_another(folder, run)
    return found


@contextmanager
def claimed_folder(run: Run, start: Path | None) -> Iterator[None]:
    """Make run.dir, hold it against other runs, and write the resolved configuration. Only rank 0.

    start  what `find_start` said; building a model takes minutes in which another run may have had the folder
    Raises ValueError where another run holds it or changed it, or it can't be written. The system frees it however
    this one ends.
    """
    folder = Path(run.run.dir)
    with ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(open(folder / LOCK, "a+", encoding="utf-8"))
            _lock(file, folder)
            if find_start(run) != start:
                raise ValueError(f"run.dir = {folder}: another run changed it while this one was starting; run again")
            write_atomically(folder / "config.yaml", dump_run(stored_form(run)))
        except OSError as e:
            reason = e.strerror or e
            raise ValueError(f"run.dir = {folder}: can't be written ({reason}); choose another folder") from None
        yield


def _lock(file: TextIO, folder: Path) -> None:
    """Take the advisory lock, where the file system can."""
    try:
        take_lock(file, PATIENCE)
    except Held as holder:
        way_out = "wait for its end, stop it, or choose another folder"
        raise ValueError(f"run.dir = {folder}: {holder} is running there; {way_out}") from None
    except OSError as e:
        logger.warning("%s can't be locked (%s): start no second run in it", folder, e.strerror or e)


def stored_form(run: Run) -> Run:
    """The run as its folder and its checkpoints keep it: started from there again it goes on from the latest."""
    return replace(run, checkpoint=replace(run.checkpoint, resume="auto"))


def _refuse_what_stands_in_the_way(folder: Path) -> None:
    """Raise ValueError for a path that can't be, and where a folder lies in a file's place or a file in a folder's."""
    try:
        if (mode := _mode(folder)) and not S_ISDIR(mode):
            raise _occupied(folder, "is no folder")
        wrong = [f"{folder / name} is a folder" for name in FILES if S_ISDIR(_mode(folder / name))]
        wrong += [f"{folder / name} is no folder" for name in FOLDERS if not S_ISDIR(_mode(folder / name) or S_IFDIR)]
    except OSError as e:
        raise ValueError(f"run.dir = {folder}: can't be read ({e.strerror or e}); choose another folder") from None
    if wrong:
        raise _occupied(folder, f"a run can't write there ({', '.join(wrong)})")


def _mode(path: Path) -> int:
    """What lies at `path`, as stat says it; 0: nothing."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return 0


def _refuse_another(folder: Path, run: Run) -> None:
    """A run that was cut before its first checkpoint may begin again; another one may not take its place."""
    differing = refused_on_resume(load_file(folder / "config.yaml"), run)
    if differing:
        name, (was, now) = next(iter(differing.items()))
        raise _occupied(folder, f"holds another run ({name} is {was!r} there, {now!r} here)")


def _occupied(folder: Path, reason: str) -> ValueError:
    return ValueError(f"run.dir = {folder}: {reason}; choose another run.dir, or remove that folder yourself")
