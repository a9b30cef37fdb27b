"""Going back to the last checkpoint within a run, past the rows that led astray."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from .checkpoint import Progress
from .checkpoint_load import load_checkpoint
from .guard import BadStep
from .job import Job
from .metrics import StepReport


def stopped_without_checkpoint(report: StepReport, every: int) -> StepReport:
    """A bad step that asks for a checkpoint to roll back to, of a run that has none, as one that stops the run.

    every  checkpoint.every
    """
    trouble = report.trouble
    if trouble is None or trouble.action != "roll_back":
        return report
    stops = BadStep(
        f"step {report.step}: {trouble.reason}; training.on_{trouble.kind} = roll_back, but there is no checkpoint yet "
        f"(checkpoint.every = {every}); save earlier, or skip such steps"
    )
    return replace(report, trouble=replace(trouble, action="stop"), stops=stops)


def roll_back(job: Job, step: int, last: Path) -> Progress:
    """Put the job where `last` stands, all but the data: rows that were read aren't read again.

    last  the newest checkpoint of this run, not of its folder: a run that was started from an earlier one has later
          ones beside it
    Weights, moments and random states are the checkpoint's. Memory states that lanes carry start afresh, since the
    checkpoint's belong to other rows. A collective call.
    """
    assert job.feed is not None
    position, counted = job.feed.position(), job.judge.counted()
    progress = load_checkpoint(job, last)
    assert progress.step < step, "a run saves behind itself"
    job.feed.seek(position)
    job.judge.count_on(counted)
    job.carried.lanes = {}
    return progress
