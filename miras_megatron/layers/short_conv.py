"""Depthwise causal convolution of a few taps, then SiLU; starts anew at every document."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from .linear import LinearFactory, own_heads

PAST_BOUND = 0.5
"""the past's taps start uniform in +- this, the token's own at 1"""


class ShortConv(nn.Module):
    """y_t = silu(sum_i w_i x_{t-i}), i = 0 .. taps-1, per channel; channels are packed per head.

    With `taps` = 0 only the SiLU is left. The taps-1 rows to the left come from outside. It starts as the token
    itself and less of its past: equal taps would make neighbours' keys alike, which a memory can't tell apart.
    """

    def __init__(self, channels: int, taps: int, factory: LinearFactory, generator: torch.Generator):
        super().__init__()
        self.context = max(taps - 1, 0)
        full = torch.empty(channels, taps).uniform_(-PAST_BOUND, PAST_BOUND, generator=generator)
        full[:, -1:] = 1.0
        self.weight = own_heads(full, factory) if taps else None

    def forward(self, x: Tensor, context: Tensor, place: Tensor | None = None) -> Tensor:
        """x [B, T, C]; context [B, taps-1, C] the rows before it; place [B, T] tokens since the document's start.

        Oldest tap first in `weight` [C, taps], as torch's convolutions have it. float32 where the weight is.
        """
        if self.weight is None:
            return silu(x)
        rows = torch.cat([context, x], 1).to(torch.promote_types(x.dtype, self.weight.dtype))
        near = None
        if place is not None:
            near = (place[..., None] >= torch.arange(self.context + 1, device=place.device)).to(rows.dtype)
        apply: Any = ShiftedProducts.apply
        mixed: Tensor = apply(rows, self.weight.to(rows.dtype), near)
        return silu(mixed)


class ShiftedProducts(torch.autograd.Function):
    """y_t = sum_i near[t, i] w_i rows_{t + taps - 1 - i}: torch's own backward of this makes four padded copies.

    rows [B, T + taps - 1, C]; weight [C, taps], oldest tap first; near [B, T, taps] 0 or 1, tap i back in time, or None
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, near: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight, *([] if near is None else [near]))
        back = weight.shape[1] - 1
        tokens = rows.shape[1] - back
        out = rows[:, back:] * weight[:, back]
        for i in range(1, back + 1):
            tap = rows[:, back - i : back - i + tokens]
            out.addcmul_(tap if near is None else tap * near[..., i : i + 1], weight[:, back - i])
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """drows_{t + taps - 1 - i} += near[t, i] w_i dy_t;  dw_i = sum_t near[t, i] rows_{t + taps - 1 - i} dy_t."""
        rows, weight, *rest = ctx.saved_tensors
        back = weight.shape[1] - 1
        tokens = rows.shape[1] - back
        d_rows, d_weight = torch.zeros_like(rows), torch.empty_like(weight)
        for i in range(back + 1):
            dy = gradients[0] if not rest or i == 0 else gradients[0] * rest[0][..., i : i + 1]
            tap = slice(back - i, back - i + tokens)
            d_rows[:, tap].addcmul_(dy, weight[:, back - i])
            d_weight[:, back - i] = (rows[:, tap] * dy).sum((0, 1))
        return d_rows, d_weight, None
