"""Going back to the last checkpoint within a run, past the rows that led astray."""

from __future__ import annotations

from pathlib import Path

from ..parallel.together import gather_objects
from .checkpoint import Progress, load_checkpoint
from .checkpoint_folder import latest_checkpoint
from .guard import BadStep
from .job import Job
from .trouble import Trouble


def roll_back(job: Job, step: int, trouble: Trouble) -> Progress:
    """Put the job where its last checkpoint stands, all but the data: rows that were read aren't read again.

    Weights, moments and random states are the checkpoint's. Memory states that lanes carry start afresh, since the
    checkpoint's belong to other rows. A collective call. Raises BadStep where there is no checkpoint.
    """
    assert job.feed is not None
    start = _last(job)
    if start is None:
        raise BadStep(
            f"step {step}: {trouble.reason}; training.on_{trouble.kind} = roll_back, but run.dir = {job.run.run.dir} "
            f"holds no checkpoint yet (checkpoint.every = {job.run.checkpoint.every}); save earlier, or skip such steps"
        )
    position = job.feed.position()
    progress = load_checkpoint(job, start)
    job.feed.seek(position)
    job.carried.lanes = {}
    return progress


def _last(job: Job) -> Path | None:
    """As rank 0 sees it: a shared disk may show it to the others later."""
    found: list[Path | None] = gather_objects(job.mesh, latest_checkpoint(job.run.run.dir))
    return found[0]
