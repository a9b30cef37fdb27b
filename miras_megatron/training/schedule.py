"""The learning rate as a pure function of the step: nothing is stored, so nothing can be resumed wrongly."""

from __future__ import annotations

import math

from ..config.schema import Optimizer


def learning_rate(step: int, optimizer: Optimizer, steps: int) -> float:
    """The learning rate of update `step`, counted from 1 to `steps`.

    Linear warm-up from 0 reaches the full rate at update warmup_steps. Then
    cosine    falls to min_lr at update decay_steps (null: the last one) and stays there
    wsd       stays level, then falls linearly to min_lr over the last decay_steps updates (null: a tenth)
    constant  stays level
    """
    if step < optimizer.warmup_steps:
        return optimizer.lr * step / optimizer.warmup_steps
    start, end = fall(optimizer, steps)
    progress = min(max((step - start) / max(end - start, 1), 0.0), 1.0) if end > start else float(step >= end)
    height = 0.5 * (1.0 + math.cos(math.pi * progress)) if optimizer.schedule == "cosine" else 1.0 - progress
    return (
        optimizer.lr
        if optimizer.schedule == "constant"
        else optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * height
    )


def fall(optimizer: Optimizer, steps: int) -> tuple[int, int]:
    """The updates at which the fall to min_lr begins and ends."""
    if optimizer.schedule == "wsd":
        length = optimizer.decay_steps if optimizer.decay_steps is not None else max(steps // 10, 1)
        return max(steps - length, optimizer.warmup_steps), steps
    return optimizer.warmup_steps, optimizer.decay_steps if optimizer.decay_steps is not None else steps
