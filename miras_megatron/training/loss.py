"""The loss as a SUM over tokens and a COUNT of them, as megatron-core's schedules take it.

Counts are reduced over data- and context-parallel ranks before anything is divided: a mean of means is
another loss as soon as two rows have different numbers of tokens that count.
"""

from __future__ import annotations

import torch
from torch import Tensor


def summed_loss(losses: Tensor, loss_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sum of the losses that count, and of their weights.

    losses [b, T] nats a token; loss_mask [b, T] weight of each token, 0 or more; None = all count once
    returns a scalar of at least float32, and the sum of weights as an int32 scalar, rounded: core counts whole tokens
    """
    wide = losses if losses.dtype == torch.float64 else losses.float()
    if loss_mask is None:
        return wide.sum(), torch.tensor(losses.numel(), dtype=torch.int32, device=losses.device)
    mask = loss_mask.to(wide.dtype)
    # A masked loss may be inf (a label no one should predict); inf x 0 would be no number.
    return torch.where(mask > 0, wide * mask, 0.0).sum(), mask.sum().round().to(torch.int32)
