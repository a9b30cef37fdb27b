"""Norms over one head's channels, in at least float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from .linear import LinearFactory, own_heads

UNIT_EPS = 1e-6


def at_least_float32(x: Tensor) -> Tensor:
    """x, raised to float32 where it is narrower."""
    return x if x.dtype == torch.float64 else x.float()


def unit(x: Tensor) -> Tensor:
    """x / sqrt(|x|^2 + 1e-6) over the last dim, at least float32."""
    wide = at_least_float32(x)
    return wide * (wide.square().sum(-1, keepdim=True) + UNIT_EPS).rsqrt()


class HeadNorm(nn.Module):
    """RMSNorm per head with one weight per channel; [..., N, D] -> [..., N, D].

    The weight belongs to the head, so ranks that share heads share it too.
    """

    def __init__(self, heads: int, head_dim: int, eps: float, factory: LinearFactory):
        super().__init__()
        self.weight = own_heads(torch.ones(heads, head_dim), factory)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = at_least_float32(x)
        return (rms_norm(wide, (x.shape[-1],), eps=self.eps) * self.weight.to(wide.dtype)).to(x.dtype)
