"""When checkpoints are written: at once, or behind the steps that follow (checkpoint.background).

Behind, a rank copies what it has to write and trains on while a thread of it writes. The checkpoint gets its name after
the first step at whose end every rank has written; one is on its way at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Thread

from ..parallel.together import any_rank
from .checkpoint import Progress, Saving
from .guard import BadStep
from .job import Job


class Saver:
    """The checkpoints of a run. All methods are collective calls and raise what `Saving` raises."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._saving: Saving | None = None
        self._thread: Thread | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """A run that the guard stops, on all ranks at once, still completes what it has begun."""
        if kind is not None and issubclass(kind, BadStep):
            list(self.finish())

    def save(self, progress: Progress) -> Iterator[Path]:
        """Begin the checkpoint of `progress`; those that are complete then."""
        yield from self.finish()
        background = self._job.run.checkpoint.background
        self._saving = Saving(self._job, progress, copies=background)
        self._job.judge.saved()
        if background:
            self._thread = Thread(target=self._saving.write, name=f"checkpoint {progress.step}", daemon=True)
            self._thread.start()
        else:
            self._saving.write()
            yield from self.finish()

    def collect(self) -> Iterator[Path]:
        """The checkpoint that was on its way, where every rank has written its part by now."""
        if self._saving is not None and not any_rank(self._job.mesh, self._writes()):
            yield from self.finish()

    def finish(self) -> Iterator[Path]:
        """The checkpoint that was on its way, waited for."""
        saving, self._saving = self._saving, None
        if saving is not None:
            if self._thread is not None:
                self._thread.join()
            yield saving.complete()

    def _writes(self) -> bool:
        return self._thread is not None and self._thread.is_alive()
