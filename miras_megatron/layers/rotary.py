"""Rotary positions (RoPE), half against half, angles in float64 so that far positions stay exact."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_table(positions: Tensor, dim: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles of `positions` [...]: float64 [..., dim / 2]. `dim` is even."""
    frequency = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim)
    angle = positions.double()[..., None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """x [..., T, N, D] turned by its tokens' angles, table [..., T, D / 2]; dtype of x."""
    cos, sin = (part.unsqueeze(-2).to(x.dtype) for part in table)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
