"""What a run tells: RUN/metrics.jsonl (one object a step), RUN/validation.jsonl, RUN/gradients.jsonl, RUN/events.jsonl,
TensorBoard, one console line a step.

Only rank 0 writes. Nothing here is read back by the run itself: lines after a resumed step are dropped,
so that a curve has one value a step however often the run was cut. Events stay: they tell why it was.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TextIO

from .guard import BadStep
from .records import EVENTS, RECORDS, count_events, drop_after, line_of
from .trouble import Trouble


@dataclass(kw_only=True)
class StepReport:
    """What one optimizer step did. Numbers are over all ranks.

    loss         nats a token, mean over the step's counted tokens
    grad_norm    global l2 norm before clipping
    lr           of this update
    tokens       tokens read, masked ones too
    seconds      wall time of the step
    tokens_per_s of the whole job
    tflops       TFLOP/s a device that the counted operations reach; None where they aren't counted
    mfu          that over the device's peak, 0 to 1; None where the peak isn't known
    peak_gib     most memory held so far: of the device, or of the process where there is none
    trouble      what was wrong with it, where weights and moments stayed as they were
    stops        what the run ends with, where that is its policy
    memory       layer name -> quantity -> value, on the steps that record it
    gradients    parameter -> l2 norm of its gradient before clipping, on the steps that record it
    idle         rank by rank the share of the step spent waiting for a neighbour's state; empty where none waits
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    tokens_per_s: float
    tflops: float | None = None
    mfu: float | None = None
    peak_gib: float = 0.0
    trouble: Trouble | None = None
    stops: BadStep | None = None
    memory: dict[str, dict[str, float]] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    idle: list[float] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """The object of metrics.jsonl; `skipped`, `memory` and `idle` only where they say something."""
        values = {f.name: getattr(self, f.name) for f in fields(self)} | {"skipped": self.trouble is not None}
        del values["gradients"], values["trouble"], values["stops"]
        return {k: v for k, v in values.items() if k not in ("skipped", "memory", "idle") or v}


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
        self._write(EVENTS, {"step": report.step} | told | ({} if back_to is None else {"back_to": back_to}))
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


def step_scalars(report: StepReport) -> dict[str, float]:
    """TensorBoard tag -> value of one step."""
    named = {
        "loss/train": report.loss,
        "optim/lr": report.lr,
        "optim/grad_norm": report.grad_norm,
        "perf/tokens_per_s": report.tokens_per_s,
        "perf/seconds": report.seconds,
        "perf/tflops": report.tflops,
        "perf/mfu": report.mfu,
        "mem/peak_gib": report.peak_gib,
    }
    inner = {f"memory/{layer}/{name}": x for layer, values in report.memory.items() for name, x in values.items()}
    idle = {f"idle/rank_{rank}": share for rank, share in enumerate(report.idle)}
    return {tag: value for tag, value in (named | inner | idle).items() if value is not None}


def console_line(report: StepReport, steps: int, pace: float) -> str:
    """step, loss, gradient norm, learning rate, speed and the time that is left at `pace` seconds a step."""
    left = max(steps - report.step, 0) * pace
    mfu = f" | MFU {100 * report.mfu:.1f}%" if report.mfu is not None else ""
    skipped = f" | {report.trouble}" if report.trouble is not None else ""
    return (
        f"step {report.step:>{len(str(steps))}}/{steps} | loss {report.loss:.4f} | grad norm {report.grad_norm:.3g} | "
        f"lr {report.lr:.3g} | {_short(report.tokens_per_s)} tokens/s{mfu} | ETA {_clock(left)}{skipped}"
    )


def board_class() -> Any:
    """TensorBoard's SummaryWriter. Raises ValueError with the way out where it isn't installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "logging.tensorboard = true: tensorboard isn't installed; pip install tensorboard, or set it to false"
        ) from None
    return SummaryWriter


def _short(number: float) -> str:
    return f"{number / 1e6:.2f}M" if number >= 1e6 else f"{number / 1e3:.1f}k" if number >= 1e4 else f"{number:.0f}"


def _clock(seconds: float) -> str:
    whole = int(seconds)
    return (
        f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
        if whole >= 3600
        else f"{whole // 60}:{whole % 60:02d}"
    )
