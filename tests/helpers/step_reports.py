"""Reports of steps that nobody made, for tests of what is told of them."""

from __future__ import annotations

from typing import Any

from miras_megatron.training.metrics import StepReport


def report(step: int, **changes: Any) -> StepReport:
    """A good step of made-up numbers, but for `changes`."""
    values = {"loss": 2.5, "grad_norm": 0.5, "lr": 1e-3, "tokens": 512, "seconds": 0.25, "tokens_per_s": 2048.0}
    return StepReport(step=step, **(values | changes))
