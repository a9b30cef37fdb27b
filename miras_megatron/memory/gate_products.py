"""Products of gates inside a tile: the lower-triangular matrices that turn a recurrence into matrix products.

For x_t = a_t x_{t-1} + s_t the solution is x = P [x_0, s_1 .. s_T] with P[t, j] = a_{j+1} ... a_t. P is the
inverse of the bidiagonal I - L, L[t, t-1] = a_t. It is summed in log space without subtraction, so gates of
exactly 0 and cumulative logs far below -200 give zeros, never NaN; its gradient divides by nothing.

Gates belong in [0, 1]. Those above 1 are neither refused, which would take a look at every gate of every call, nor
clamped, which would be another function than the oracle's without a word: they grow what they act on, here, in
`fused_scalars` and in the kernel for CPUs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

LOG_FLOOR = {torch.float32: -60.0, torch.float64: -600.0}
"""Products below exp(this) count as 0: at most 1e-26 of the diagonal."""
LEAST = {dtype: math.exp(floor) * (1.0 + 1e-4) for dtype, floor in LOG_FLOOR.items()}
"""exp(floor) and a rounding more"""


def log_products(log_gate: Tensor) -> Tensor:
    """P by summed logs: log_gate [..., T] -> [..., T+1, T+1]; entry (t, j) is exp(sum of logs j+1..t), 0 above."""
    floor, size = LOG_FLOOR[log_gate.dtype], log_gate.shape[-1] + 1
    ones = log_gate.new_ones(size, size)
    # the sums are a matrix product, in which an infinity times 0 would be NaN: a gate of 0 is one below the floor
    steps = torch.nn.functional.pad(log_gate.clamp_min(2.0 * floor), (1, 0)).unsqueeze(-1)
    sums = ones.tril() @ (steps * ones.tril(-1))
    # what underflows is 0 at once: subnormal numbers would slow every product that meets them tenfold
    products = torch.threshold_(sums.clamp_min_(floor).exp_(), LEAST[sums.dtype], 0.0)
    return products.mul_(ones.tril_())


def gate_gradient(products: Tensor, grad: Tensor) -> Tensor:
    """dl/da_t from dl/dP: the subdiagonal of P^T dP P^T (since dP = P dL P); products, grad [..., T+1, T+1]."""
    inner = grad.tril() @ products.transpose(-1, -2)
    return (products[..., :, 1:] * inner[..., :, :-1]).sum(-2)


class _GateProducts(torch.autograd.Function):
    """P with the gradient above; `is_log` says whether the gate came as a logarithm."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, is_log: bool) -> Tensor:
        products = log_products(gate if is_log else gate.log())
        ctx.save_for_backward(products)
        ctx.is_log = is_log
        return products

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (products,) = ctx.saved_tensors
        grad = gate_gradient(products, grads[0])
        if ctx.is_log:
            grad = grad * products.diagonal(offset=-1, dim1=-2, dim2=-1)
        return grad, None


def keep_products(log_keep: Tensor) -> Tensor:
    """P of a keep gate given as a logarithm, [..., T] -> [..., T+1, T+1], differentiable."""
    return _GateProducts.apply(log_keep, True)


def momentum_products(momentum: Tensor) -> Tensor:
    """P of a momentum gate in [0, 1], [..., T] -> [..., T+1, T+1], differentiable, also at exactly 0."""
    return _GateProducts.apply(momentum, False)
