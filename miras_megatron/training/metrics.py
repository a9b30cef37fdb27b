"""What is measured of a step, and how it is shown: tags of TensorBoard, one console line."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from .guard import BadStep
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
    rows         read by the run so far, also those that a roll back left out; a step of the same number and rows is
                 the same step, come to again by a run that was cut
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
    rows: int = 0
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
        for name in ("rows", "gradients", "trouble", "stops"):
            del values[name]
        return {k: v for k, v in values.items() if k not in ("skipped", "memory", "idle") or v}


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


def _short(number: float) -> str:
    return f"{number / 1e6:.2f}M" if number >= 1e6 else f"{number / 1e3:.1f}k" if number >= 1e4 else f"{number:.0f}"


def _clock(seconds: float) -> str:
    whole = int(seconds)
    return (
        f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
        if whole >= 3600
        else f"{whole // 60}:{whole % 60:02d}"
    )
