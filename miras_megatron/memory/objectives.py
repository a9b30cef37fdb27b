"""Attentional biases: what the inner loop minimises, as the error signal g = dl/d(prediction) (Miras).

Normalised so that gradients are continuous: l2 = 1/2 ||e||^2, l_p = (1/p) ||e||_p^p; the papers'
factors 2 and p are absorbed by the rate. All tensors are [..., D], e = prediction - target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .rules import Rule

SMOOTHING = 1e-6

Delta = Any
"""A Tensor where the objective has a threshold, else None."""
Pulled = tuple[Tensor, Tensor, Tensor | None]
Signal = Callable[[Rule, Tensor, Tensor, Delta], Tensor]
Pullback = Callable[[Rule, Tensor, Tensor, Tensor, Delta], Pulled]


@dataclass(frozen=True)
class Objective:
    """One attentional bias.

    signal(rule, e, target, delta) -> g                   [..., D]
    pullback(rule, dg, e, target, delta) -> de, dtarget, ddelta   the transposed Jacobian of `signal`, by hand;
        dtarget leaves out the path through e
    """

    signal: Signal
    pullback: Pullback


def _dot(rule: Rule, e: Tensor, target: Tensor, delta: Delta) -> Tensor:
    return -target


def _dot_back(rule: Rule, dg: Tensor, e: Tensor, target: Tensor, delta: Delta) -> Pulled:
    return torch.zeros_like(dg), -dg, None


def _l2(rule: Rule, e: Tensor, target: Tensor, delta: Delta) -> Tensor:
    return e


def _l2_back(rule: Rule, dg: Tensor, e: Tensor, target: Tensor, delta: Delta) -> Pulled:
    return dg, torch.zeros_like(dg), None


def _lp(rule: Rule, e: Tensor, target: Tensor, delta: Delta) -> Tensor:
    if rule.p == 2.0:
        return e
    return torch.tanh(rule.sharpness * e) * (e * e + SMOOTHING) ** ((rule.p - 1.0) / 2.0)


def _lp_back(rule: Rule, dg: Tensor, e: Tensor, target: Tensor, delta: Delta) -> Pulled:
    if rule.p == 2.0:
        return dg, torch.zeros_like(dg), None
    sign, square, power = torch.tanh(rule.sharpness * e), e * e + SMOOTHING, (rule.p - 1.0) / 2.0
    slope = rule.sharpness * (1.0 - sign * sign) * square**power + sign * 2.0 * power * e * square ** (power - 1.0)
    return dg * slope, torch.zeros_like(dg), None


def _huber_coordinate(rule: Rule, e: Tensor, target: Tensor, delta: Delta) -> Tensor:
    return torch.where(e.abs() <= delta, e, delta * torch.sign(e))


def _huber_coordinate_back(rule: Rule, dg: Tensor, e: Tensor, target: Tensor, delta: Delta) -> Pulled:
    small = e.abs() <= delta
    zero = torch.zeros_like(dg)
    return torch.where(small, dg, zero), zero, torch.where(small, zero, dg * torch.sign(e))


def _norm(e: Tensor) -> Tensor:
    return torch.linalg.vector_norm(e, dim=-1, keepdim=True)


def _unit(e: Tensor) -> Tensor:
    """e / ||e||, and 0 where e is 0."""
    norm = _norm(e)
    return e / torch.where(norm > 0, norm, torch.ones_like(norm))


def _unit_back(du: Tensor, e: Tensor) -> Tensor:
    norm = _norm(e)
    safe = torch.where(norm > 0, norm, torch.ones_like(norm))
    unit = e / safe
    return torch.where(norm > 0, (du - unit * (du * unit).sum(-1, keepdim=True)) / safe, torch.zeros_like(du))


def _huber_norm(rule: Rule, e: Tensor, target: Tensor, delta: Delta) -> Tensor:
    return torch.where(_norm(e) <= delta, e, delta * _unit(e))


def _huber_norm_back(rule: Rule, dg: Tensor, e: Tensor, target: Tensor, delta: Delta) -> Pulled:
    small, zero = _norm(e) <= delta, torch.zeros_like(dg)
    outer = torch.where(small, zero, dg)
    return torch.where(small, dg, zero) + _unit_back(outer * delta, e), zero, outer * _unit(e)


def _huber_mixed(rule: Rule, e: Tensor, target: Tensor, delta: Delta) -> Tensor:
    return torch.where(_norm(e) <= delta, e, delta * torch.tanh(rule.sharpness * e))


def _huber_mixed_back(rule: Rule, dg: Tensor, e: Tensor, target: Tensor, delta: Delta) -> Pulled:
    small, zero = _norm(e) <= delta, torch.zeros_like(dg)
    sign = torch.tanh(rule.sharpness * e)
    steep = delta * rule.sharpness * (1.0 - sign * sign)
    return torch.where(small, dg, dg * steep), zero, torch.where(small, zero, dg * sign)


def _value_shift(rule: Rule, e: Tensor, target: Tensor, delta: Delta) -> Tensor:
    return e + delta * _unit(e)


def _value_shift_back(rule: Rule, dg: Tensor, e: Tensor, target: Tensor, delta: Delta) -> Pulled:
    return dg + _unit_back(dg * delta, e), torch.zeros_like(dg), dg * _unit(e)


OBJECTIVES: dict[str, Objective] = {
    "dot": Objective(_dot, _dot_back),
    "l2": Objective(_l2, _l2_back),
    "lp": Objective(_lp, _lp_back),
    "huber_coordinate": Objective(_huber_coordinate, _huber_coordinate_back),
    "huber_norm": Objective(_huber_norm, _huber_norm_back),
    "huber_mixed": Objective(_huber_mixed, _huber_mixed_back),
    "value_shift": Objective(_value_shift, _value_shift_back),
}
