"""When checkpoints are written: at once, or behind the steps that follow (checkpoint.background).

Behind, a rank copies what it has to write and trains on while a thread of it writes. The checkpoint gets its name after
the first step at whose end every rank has written; one is on its way at a time. The thread isn't a daemon: Python waits
for it at its end, for it would be torn out of torch's writer, and the process would abort instead of telling its code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from threading import Thread

from ..parallel.together import any_rank
from .checkpoint import Progress
from .checkpoint_save import Saving
from .guard import BadStep
from .job import Job
from .signs import SIGNS, alive

LOOK = 0.5
"""seconds between two looks at a thread that is waited for"""

logger = logging.getLogger(__name__)


class Saver:
    """The checkpoints of a run. All methods are collective calls and raise what `Saving` raises.

    last  the newest complete one that this run stands on: where it started, then what it saved
    """

    def __init__(self, job: Job, start: Path | None, tell: Callable[[Path], None]) -> None:
        """start: the checkpoint that the run goes on from; tell: is called with every one that is complete."""
        self.last = start
        self._job, self._tell = job, tell
        self._saving: Saving | None = None
        self._thread: Thread | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """A run that a bad step stops, on all ranks at once, still completes what it has begun."""
        if kind is not None and issubclass(kind, BadStep):
            try:
                self.finish()
            except ValueError as failed:  # why the run stops is what its user needs first
                logger.error("%s", failed)

    @property
    def has_any(self) -> bool:
        """Whether there is a checkpoint to go back to, or one on its way."""
        return self.last is not None or self._saving is not None

    def save(self, progress: Progress) -> None:
        """Begin the checkpoint of `progress`; complete it too, but for checkpoint.background."""
        self.finish()
        background = self._job.run.checkpoint.background
        self._saving = Saving(self._job, progress, copies=background)
        if background:
            self._thread = Thread(target=self._saving.write, name=f"checkpoint {progress.step}")
            self._thread.start()
        else:
            self._saving.write()
            self.finish()

    def collect(self) -> None:
        """Complete the checkpoint that is on its way, where every rank has written its part by now."""
        if self._saving is not None and not any_rank(self._job.mesh, self._writes()):
            self.finish()

    def finish(self) -> None:
        """Complete the checkpoint that is on its way, after waiting for it."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        if self._thread is not None:
            self._wait_for(self._thread)
        self.last = saving.complete()
        self._job.judge.saved()
        self._tell(self.last)

    @staticmethod
    def _wait_for(thread: Thread) -> None:
        """Wait as long as it moves: what it writes and reads are signs of life of this thread's now."""
        seen = -1
        while thread.is_alive():
            thread.join(LOOK)
            if SIGNS.behind != seen:
                seen = SIGNS.behind
                alive("saving a checkpoint")

    def _writes(self) -> bool:
        return self._thread is not None and self._thread.is_alive()
