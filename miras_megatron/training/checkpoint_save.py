"""How a checkpoint gets to the disk: planned by all ranks, written by each alone, named by all; and a disk that fails.

`saver` says when. What is in it is `checkpoint`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from ..config.describe import dump_run
from ..parallel.together import gather_objects
from .atomic_write import write_atomically
from .checkpoint import Progress, common_state
from .checkpoint_folder import begin_checkpoint, complete_checkpoint, keep_newest, latest_checkpoint
from .checkpoint_manifest import describe, write_manifest
from .job import Job
from .plain_files import write_plain
from .rank_states import lane_tensors, random_tensors
from .run_folder import stored_form
from .signs import alive
from .tensor_files import PlannedSave

logger = logging.getLogger(__name__)


class Saving:
    """One checkpoint on its way to the disk: begun and completed by all ranks together, written by each alone."""

    def __init__(self, job: Job, progress: Progress, *, copies: bool = False) -> None:
        """Make its folder and plan it. A collective call.

        copies  of all tensors are taken, so that training may go on before `write` has ended
        Raises ValueError where the disk doesn't take it; the checkpoints before stay.
        """
        assert job.engine is not None
        alive("saving a checkpoint")
        self._job, self.step = job, progress.step
        self._failure: BaseException | None = None
        self._described: dict[str, dict[str, Any]] = {}
        with self._told():
            self._folder = begin_checkpoint(self._run_dir, self.step, job.mesh.rank, _barrier(job))
            planned = PlannedSave(copies=copies)
            parts = job.engine.state() | random_tensors(job) | lane_tensors(job)
            dist_checkpointing.save(parts, str(self._folder), sharded_strategy=planned)
            self._common = common_state(job, progress)
        assert planned.files is not None, "dist_checkpointing.save calls the strategy"
        self._files = planned.files

    def write(self) -> None:
        """This rank's tensors, down to the disk, and their digests. Raises nothing: `complete` tells all ranks."""
        try:
            self._files.write()
            mine = self._folder.glob(f"__{self._job.mesh.rank}_*")
            self._described = {path.name: describe(path) for path in mine}
        except Exception as error:
            self._failure = error

    def complete(self) -> Path:
        """Name it, make it `latest`, and drop the oldest: the checkpoint. A collective call.

        Raises ValueError where the disk didn't take it on any rank; the checkpoints before stay.
        """
        alive("saving a checkpoint")
        rank, keep = self._job.mesh.rank, self._job.run.checkpoint.keep
        self._job.mesh.barrier("writing a checkpoint")  # names who hangs; what follows would only say that one does
        with self._told():
            self._files.finish(self._failure)
            gathered = gather_objects(self._job.mesh, self._described)
            if rank == 0:
                self._write_the_rest(gathered)
            made = complete_checkpoint(self._run_dir, self.step, rank, _barrier(self._job))
        if rank == 0:
            _drop_old(self._run_dir, keep)
        return made

    def _write_the_rest(self, gathered: list[dict[str, dict[str, Any]]]) -> None:
        """What one rank writes for all: common state, configuration, manifest."""
        write_plain(self._folder / "common.pt", self._common)
        write_atomically(self._folder / "config.yaml", dump_run(stored_form(self._job.run)))
        written = {name: entry for part in gathered for name, entry in part.items()}
        others = [path for path in self._folder.iterdir() if path.name not in written]
        write_manifest(self._folder, self.step, written | {path.name: describe(path) for path in others})

    @property
    def _run_dir(self) -> Path:
        return Path(self._job.run.run.dir)

    def _told(self) -> AbstractContextManager[None]:
        return _told_where_the_disk_fails(self._run_dir, self.step)


def _drop_old(run_dir: Path, keep: int) -> None:
    """Old checkpoints that don't go are no reason to end a run whose new one is there."""
    try:
        keep_newest(run_dir, keep)
    except OSError as error:
        logger.warning("an old checkpoint of %s stays (%s)", run_dir, error)


def _barrier(job: Job) -> Callable[[], None]:
    return lambda: job.mesh.barrier("saving a checkpoint")


@contextmanager
def _told_where_the_disk_fails(run_dir: Path, step: int) -> Iterator[None]:
    """A full or failing disk as one message. torch wraps what went wrong on any rank, and writes through C++ too."""
    try:
        yield
    except (OSError, RuntimeError, CheckpointException) as error:
        causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
        failed = [cause for cause in causes if _is_of_the_disk(cause)]
        if not failed:
            raise
        cause = failed[0]
        reason = (cause.strerror if isinstance(cause, OSError) else None) or str(cause).splitlines()[0]
        kept = latest_checkpoint(run_dir)
        way_out = f"{kept} stays, run again to go on from it" if kept else "there is none before it"
        raise ValueError(
            f"run.dir = {run_dir}: the checkpoint of step {step} can't be written ({reason}); make room there, "
            f"or keep fewer (checkpoint.keep); {way_out}"
        ) from None


def _is_of_the_disk(cause: BaseException) -> bool:
    if isinstance(cause, ConnectionError | TimeoutError):  # OSErrors too, but of a lost rank
        return False
    return isinstance(cause, OSError) or "PytorchStreamWriter" in str(cause)
