"""Micro-batches whose forwards run ahead of the backwards: F0 F1 B0 F2 B1 .. where one rank has all layers.

megatron-core's schedule without a pipeline goes F0 B0 F1 B1, so that a relay's skew is paid for every micro-batch;
with w forwards ahead it is hidden. Pieces are computed again anyway: a forward in flight costs only its saved states.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn


def run_forwards_ahead(
    forward_step: Callable[[Iterator[Any], nn.Module], tuple[Tensor, Callable[[Tensor], Any]]],
    batches: Iterator[Any],
    model: nn.Module,
    config: Any,
    count: int,
    ahead: int,
) -> None:
    """Forward and backward of `count` micro-batches with `ahead` forwards in flight; gradients are finished after.

    forward_step  as megatron-core's schedules take it: (sum of losses, tokens, anything) from its second result
    config        the TransformerConfig with the schedule's hooks
    """
    waiting: deque[Tensor] = deque()
    tokens: Tensor | None = None
    scale = config.grad_scale_func or (lambda loss: loss)
    with config.no_sync_func() if config.no_sync_func is not None else nullcontext():
        for _ in range(count):
            output, report = forward_step(batches, model)
            total, here, _ = report(output)
            tokens = here if tokens is None else tokens + here
            waiting.append(scale(total))
            if len(waiting) > ahead:
                waiting.popleft().backward()
        while waiting:
            waiting.popleft().backward()
    if config.finalize_model_grads_func is not None:
        config.finalize_model_grads_func([model], tokens)
