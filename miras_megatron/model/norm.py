"""RMSNorm for megatron-core's norm slots.

Core's own torch norm refuses sequence parallelism, under which ranks hold different tokens and a norm's
gradient is a partial sum: `weight.sequence_parallel` is what makes core add the parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from miras_megatron.compat.apex import pick_rms_norm


class RMSNorm(nn.Module):
    """x [..., d] -> x / sqrt(mean(x^2) + eps) * weight, computed in float32; returns x's dtype."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self._chosen: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {}
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if kind not in self._chosen:
            self._chosen[kind] = pick_rms_norm(x.device)
        return self._chosen[kind](x, self.weight, self.eps)
