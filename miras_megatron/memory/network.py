"""The memory network f(z) = [z +] [LN] (W_out gelu(... W_in z)), its read and its inner gradient by hand.

The residual is not in here: the scans fold it into the target (e = net - (v - k)) and add it to the
read (y = net + q). Rows are tokens: a matrix acts as x W^T. Everything is differentiable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu

from .objectives import OBJECTIVES
from .rules import Rule

LAYER_NORM_EPS = 1e-5


@dataclass
class SlowNorm:
    """The memory's affine LN; weight and bias are slow parameters, [N, 1, D]."""

    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, params: dict[str, Tensor], dtype: torch.dtype) -> SlowNorm | None:
        """The norm of a rule's parameters, or None where it has none."""
        if "norm_weight" not in params:
            return None
        return cls(params["norm_weight"].to(dtype)[:, None], params["norm_bias"].to(dtype)[:, None])

    def __call__(self, z: Tensor) -> Tensor:
        return normalise(z)[0] * self.weight + self.bias


@dataclass
class Factors:
    """The inner gradients of some tokens as outer products: u_j of matrix i is errors[i]_j inputs[i]_j^T.

    inputs, errors  per matrix [B, N, T, in], [B, N, T, out]
    residual_error  [B, N, T, D]  prediction - target
    """

    inputs: list[Tensor]
    errors: list[Tensor]
    residual_error: Tensor


def normalise(z: Tensor) -> tuple[Tensor, Tensor]:
    """LN without affine part: (z - mean) / std and 1 / std, over the last dim."""
    centred = z - z.mean(-1, keepdim=True)
    rstd = (centred.square().mean(-1, keepdim=True) + LAYER_NORM_EPS).rsqrt()
    return centred * rstd, rstd


def gelu_slope(z: Tensor) -> Tensor:
    """gelu'(z) of the exact erf form: Phi(z) + z phi(z)."""
    density = torch.exp(-0.5 * z * z) * (1.0 / math.sqrt(2.0 * math.pi))
    return 0.5 * (1.0 + torch.erf(z * math.sqrt(0.5))) + z * density


def read_network(depth: int, norm: SlowNorm | None, apply: Callable[[int, Tensor], Tensor], x: Tensor) -> Tensor:
    """net(x) where `apply(i, h)` is what matrix i makes of h; [B, N, T, in] -> [B, N, T, D]."""
    hidden = x
    for i in range(depth):
        hidden = apply(i, hidden if i == 0 else gelu(hidden))
    return hidden if norm is None else norm(hidden)


def apply_weights(weights: Sequence[Tensor]) -> Callable[[int, Tensor], Tensor]:
    """`apply` of fixed weights, per matrix [B, N, out, in]."""
    return lambda i, h: h @ weights[i].transpose(-1, -2)


def gradient_factors(
    rule: Rule, weights: Sequence[Tensor], norm: SlowNorm | None, key: Tensor, target: Tensor, delta: Tensor | None
) -> Factors:
    """Inner gradients of all tokens at the same `weights`, back-propagated by hand (deep_memory, anchor).

    weights per matrix [B, N, out, in]; key [B, N, T, in]; target, delta [B, N, T, D]
    """
    inputs, pre = [key], []
    for i, weight in enumerate(weights):
        pre.append(inputs[-1] @ weight.transpose(-1, -2))
        if i < len(weights) - 1:
            inputs.append(gelu(pre[-1]))
    prediction, pull = _output(norm, pre[-1])
    residual_error = prediction - target
    errors = [pull(OBJECTIVES[rule.objective].signal(rule, residual_error, target, delta))]
    for i in range(len(weights) - 1, 0, -1):
        errors.insert(0, (errors[0] @ weights[i]) * gelu_slope(pre[i - 1]))
    return clamp_factors(rule, Factors(inputs, errors, residual_error))


def _output(norm: SlowNorm | None, z: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The prediction, and the map that pulls an error at it back to z."""
    if norm is None:
        return z, lambda error: error
    unit, rstd = normalise(z)

    def pull(error: Tensor) -> Tensor:
        scaled = error * norm.weight
        mean, along = scaled.mean(-1, keepdim=True), (scaled * unit).mean(-1, keepdim=True)
        return rstd * (scaled - mean - unit * along)

    return unit * norm.weight + norm.bias, pull


def clamp_factors(rule: Rule, factors: Factors) -> Factors:
    """Each token's gradient of each matrix scaled to at most `max_gradient_norm` (||u|| = ||error|| ||input||)."""
    limit = rule.max_gradient_norm
    if limit is None:
        return factors

    def clamp(error: Tensor, x: Tensor) -> Tensor:
        square = (error.square().sum(-1, keepdim=True) * x.square().sum(-1, keepdim=True)).clamp_min(limit * limit)
        return error * (limit * square.rsqrt())

    errors = [clamp(e, x) for e, x in zip(factors.errors, factors.inputs, strict=True)]
    return Factors(factors.inputs, errors, factors.residual_error)
