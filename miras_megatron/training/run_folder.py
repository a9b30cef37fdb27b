"""Whose folder is it: a run never writes over another's, and knows where it goes on from before anything is built."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..config.describe import dump_run
from ..config.load import load_run
from ..config.schema import Run, refused_on_resume
from .checkpoint_folder import find_checkpoint, folder_of, latest_checkpoint, write_atomically

TRACES = ("config.yaml", "metrics.jsonl", "checkpoints")
"""What a run leaves in its folder."""


def find_start(run: Run) -> Path | None:
    """The checkpoint that the run goes on from; None: from step 0.

    Raises ValueError where run.dir holds another run, or the named checkpoint isn't there. Writes nothing.
    """
    folder, resume = Path(run.run.dir), run.checkpoint.resume
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


def claim_folder(run: Run) -> None:
    """Make run.dir and write the resolved configuration into it. Only rank 0 calls it, after `find_start`."""
    folder = Path(run.run.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "config.yaml", dump_run(stored_form(run)))
    except OSError as e:
        raise ValueError(f"run.dir = {folder}: can't be written ({e.strerror or e}); choose another folder") from None


def stored_form(run: Run) -> Run:
    """The run as its folder and its checkpoints keep it: started from there again it goes on from the latest."""
    return replace(run, checkpoint=replace(run.checkpoint, resume="auto"))


def _refuse_another(folder: Path, run: Run) -> None:
    """A run that was cut before its first checkpoint may begin again; another one may not take its place."""
    differing = refused_on_resume(load_run([str(folder / "config.yaml")]), run)
    if differing:
        name, (was, now) = next(iter(differing.items()))
        raise _occupied(folder, f"holds another run ({name} is {was!r} there, {now!r} here)")


def _occupied(folder: Path, reason: str) -> ValueError:
    return ValueError(f"run.dir = {folder}: {reason}; choose another run.dir, or remove that folder yourself")
