"""What a run tells: RUN/metrics.jsonl (one object a step), RUN/validation.jsonl, RUN/gradients.jsonl, RUN/events.jsonl,
TensorBoard, one console line a step.

Only rank 0 writes. Nothing here is read back by the run itself: lines after a resumed step are dropped,
so that a curve has one value a step however often the run was cut. Events stay: they tell why it was.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from .metrics import StepReport, console_line, step_scalars
from .records import EVENTS, RECORDS, count_events, drop_after, line_of


class RunLog:
    """The open files of one run. A rank that isn't rank 0 holds none and writes nothing."""

    def __init__(
        self,
        folder: Path,
        *,
        last_step: int,
        steps: int,
        every: int = 1,
        tensorboard: bool = True,
        writes: bool = True,
        console: TextIO | None = None,
    ) -> None:
        """Open the logs of a run that stands at `last_step` of `steps`; later records are dropped."""
        self.writes, self.every, self.steps, self.console = writes, every, steps, console or sys.stdout
        self._folder = folder
        self._files: dict[str, TextIO] = {}
        self._pace: float | None = None
        self._board: Any = None
        self.counts: Counter[str] = Counter()
        self._tensorboard = tensorboard
        if writes:
            folder.mkdir(parents=True, exist_ok=True)
            self.counts = count_events(folder / EVENTS)
            self.go_on_from(last_step)

    def go_on_from(self, step: int) -> None:
        """Drop what was recorded after `step`, and open everything for the next."""
        if not self.writes:
            return
        self.close()
        for name in RECORDS:
            drop_after(self._folder / name, step)
        for name in ("metrics.jsonl", "validation.jsonl"):
            self._open(name)
        self._board = board_class()(str(self._folder / "tb"), purge_step=step + 1) if self._tensorboard else None

    def step(self, report: StepReport) -> None:
        """Record one step."""
        self._pace = report.seconds if self._pace is None else 0.9 * self._pace + 0.1 * report.seconds
        if not self.writes:
            return
        self._write("metrics.jsonl", report.record())
        if report.gradients:
            self._write("gradients.jsonl", {"step": report.step, "gradients": report.gradients})
        self._scalars(step_scalars(report), report.step)
        if report.step % self.every == 0 or report.step in (1, self.steps) or report.trouble is not None:
            self.say(console_line(report, self.steps, self._pace))

    def validation(self, step: int, results: dict[str, Any]) -> None:
        """Record a validation: `loss` in nats a token, `bits_per_byte`, and `by_position`."""
        if not self.writes:
            return
        self._write("validation.jsonl", {"step": step} | results)
        flat = {f"validation/{k}": v for k, v in results.items() if isinstance(v, int | float)}
        flat |= {f"validation/position_{i}": v for i, v in enumerate(results.get("by_position", []))}
        self._scalars({"loss/val": results["loss"]} | flat, step)
        self.say(f"validation at step {step}: {results['bits_per_byte']:.4f} bits per byte, loss {results['loss']:.4f}")

    def event(self, report: StepReport, back_to: int | None = None) -> None:
        """Record a bad step: what was wrong, what was done, and the step that a roll back went to."""
        trouble = report.trouble
        if not self.writes or trouble is None:
            return
        told = asdict(trouble) | {"loss": report.loss, "grad_norm": report.grad_norm, "lr": report.lr}
        self._write(
            EVENTS,
            {"step": report.step, "rows": report.rows} | told | ({} if back_to is None else {"back_to": back_to}),
        )
        self.counts = count_events(self._folder / EVENTS)
        step = report.step if back_to is None else back_to  # what lies after it is dropped from the board
        self._scalars({f"trouble/{action}": count for action, count in self.counts.items()}, step)

    def say(self, line: str) -> None:
        """One line on the console of rank 0."""
        if self.writes:
            print(line, file=self.console, flush=True)

    def close(self) -> None:
        """Flush and close everything."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        if self._board is not None:
            self._board.close()

    def _open(self, name: str) -> TextIO:
        if name not in self._files:
            self._files[name] = open(self._folder / name, "a", encoding="utf-8", buffering=1)
        return self._files[name]

    def _write(self, name: str, record: dict[str, Any]) -> None:
        self._open(name).write(line_of(record))

    def _scalars(self, values: dict[str, float], step: int) -> None:
        if self._board is not None:
            for tag, value in values.items():
                self._board.add_scalar(tag, value, step)


def board_class() -> Any:
    """TensorBoard's SummaryWriter. Raises ValueError with the way out where it isn't installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "logging.tensorboard = true: tensorboard isn't installed; pip install tensorboard, or set it to false"
        ) from None
    return SummaryWriter
