"""Norms over one head's channels, in at least float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from .linear import LinearFactory, own_heads

UNIT_EPS = 1e-6


def at_least_float32(x: Tensor) -> Tensor:
    """x, raised to float32 where it is narrower."""
    return x if x.dtype == torch.float64 else x.float()


class _Unit(torch.autograd.Function):
    """Keeps the result, which the memory keeps anyway, instead of what autograd would keep of its making."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        wide = at_least_float32(x)
        scale = (torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_() + UNIT_EPS).rsqrt_()
        result = wide * scale
        ctx.save_for_backward(result, scale)
        ctx.dtype = x.dtype
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        result, scale = ctx.saved_tensors
        along = (grads[0] * result).sum(-1, keepdim=True)
        found: Tensor = torch.addcmul(grads[0], result, along, value=-1.0).mul_(scale).to(ctx.dtype)
        return found


def unit(x: Tensor) -> Tensor:
    """x / sqrt(|x|^2 + 1e-6) over the last dim, at least float32."""
    found: Tensor = _Unit.apply(x)
    return found


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
