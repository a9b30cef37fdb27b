"""Depthwise causal convolution of a few taps, then SiLU; starts anew at every document."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from .linear import LinearFactory, own_heads


class ShortConv(nn.Module):
    """y_t = silu(sum_i w_i x_{t-i}), i = 0 .. taps-1, per channel; channels are packed per head.

    With `taps` = 0 only the SiLU is left. The taps-1 rows to the left come from outside.
    """

    def __init__(self, channels: int, taps: int, factory: LinearFactory, generator: torch.Generator):
        super().__init__()
        self.context = max(taps - 1, 0)
        bound = max(taps, 1) ** -0.5
        full = torch.empty(channels, taps).uniform_(-bound, bound, generator=generator)
        self.weight = own_heads(full, factory) if taps else None

    def forward(self, x: Tensor, context: Tensor, place: Tensor | None = None) -> Tensor:
        """x [B, T, C]; context [B, taps-1, C] the rows before it; place [B, T] tokens since the document's start.

        Oldest tap first in `weight` [C, taps], as torch's convolutions have it.
        """
        if self.weight is None:
            return silu(x)
        tokens, rows = x.shape[1], torch.cat([context, x], 1)
        out = x * self.weight[:, -1]
        for back in range(1, self.context + 1):
            tap = rows[:, self.context - back : self.context - back + tokens] * self.weight[:, -1 - back]
            out = out + (tap if place is None else tap * (place >= back).to(x.dtype)[..., None])
        return silu(out)
