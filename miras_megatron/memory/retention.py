"""Retention: from the stored variable to the weights (the link), and one token's step of each gate (Miras, retention).

The stored variable is W itself for decay, elastic_net (local) and linear KL; A for `lq` and the FTRL form of
elastic_net; log W for exact KL; logit W for sigmoid. Matrices are [B, N, out, in]; gates of a token are
broadcast to that shape by the caller.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .rules import Rule

NORM_EPS = 1e-6
SMALLEST_WEIGHT = 1e-6


def dual_exponent(rule: Rule) -> float:
    """p of the norm in `exact_link`: the dual exponent q / (q - 1)."""
    return rule.q / (rule.q - 1.0)


def lq_norm(rule: Rule, accumulator: Tensor) -> Tensor:
    """The norm the link divides by, per matrix and head: [B, N, out, in] -> [B, N, 1, 1]."""
    order = dual_exponent(rule) if rule.link == "exact_link" else rule.q
    # vector_norm's slope at A = 0 is 0, where powers and roots written out would give NaN
    norm: Tensor = torch.linalg.vector_norm(accumulator, order, dim=(-2, -1), keepdim=True)
    return norm.clamp_min(NORM_EPS)


def lq_scale(rule: Rule, accumulator: Tensor) -> Tensor:
    """What the link multiplies with, from the norm of `accumulator`: [B, N, 1, 1]."""
    power = {"printed": rule.q - 2.0, "exact_link": dual_exponent(rule) - 2.0, "unit_norm": 1.0}[rule.link]
    return lq_norm(rule, accumulator) ** (-power)


def lq_shape(rule: Rule, accumulator: Tensor) -> Tensor:
    """The link before scaling: A, or its elementwise power sign(A)|A|^(p-1) for `exact_link`."""
    if rule.link != "exact_link":
        return accumulator
    return accumulator.sign() * accumulator.abs().pow(dual_exponent(rule) - 1.0)


def link(rule: Rule, stored: Tensor) -> Tensor:
    """The weights W of a stored variable (fresh norm for `lq`; FTRL stores its weights beside A)."""
    if rule.retention == "lq":
        return lq_shape(rule, stored) * lq_scale(rule, stored)
    if rule.retention == "kl" and rule.kl_form == "exact":
        return stored.exp()
    if rule.retention == "sigmoid":
        return stored.sigmoid()
    return stored


def soft_threshold(rule: Rule, x: Tensor, threshold: Tensor) -> Tensor:
    """Elastic net's shrinkage: sign(x) max(0, |x| - gam), or the smooth x arctan(|x| / gam) / (pi / 2)."""
    if rule.soft == "hard":
        return torch.where(x.abs() > threshold, x - threshold * x.sign(), torch.zeros_like(x))
    return x * (torch.atan2(x.abs(), threshold) / (0.5 * math.pi))


def elastic_step(rule: Rule, weight: Tensor, write: Tensor, lr: Tensor) -> Tensor:
    """Local elastic net: soft_gam(lam W - z u) with lam = c2/(c2+r), z = r lam, gam = r c2/(c1 (r+c2)); write = r u."""
    shrink = rule.c2 / (rule.c2 + lr)
    return soft_threshold(rule, shrink * (weight - write), lr * shrink / rule.c1)


def kl_log_step(log_weight: Tensor, keep: Tensor, write: Tensor, log_scale: Tensor) -> Tensor:
    """log of c softmax(a log W - r u), the softmax over the input axis; log_scale [N, 1, 1]."""
    return torch.log_softmax(keep * log_weight - write, -1) + log_scale
