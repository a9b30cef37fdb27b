"""One tile of a network memory, backward (deep_memory 2): R, U and A, the read, the update and the anchor.

The anchor's part is a double backward. No autograd in here; names and shapes as in fused_tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .fused_scalars import TileScalars
from .fused_tile import Affine, Anchor, Normalised, Read, TileTokens, scaled
from .objectives import OBJECTIVES
from .rules import Rule

CURVATURE = 2.0 / math.sqrt(2.0 * math.pi) / math.e


@dataclass
class TileGrads:
    """Gathered over R, U and A: per matrix dV, dX, d[W; S] at the tile's start and its scalars; dq; the LN's."""

    writes: list[Tensor]
    inputs: list[Tensor]
    stacks: list[Tensor]
    scalars: list[TileScalars]
    query: Tensor
    norm_weight: Tensor | None
    norm_bias: Tensor | None


def read_backward(
    dread: Tensor, stacks: list[Tensor], scalars: list[TileScalars], anchor: Anchor, affine: Affine | None, read: Read
) -> TileGrads:
    """R: from dl/d(net reads). Holds no incoming state gradient."""
    grads, dz = TileGrads([], [], [], [], dread, None, None), dread
    if affine is not None and read.norm is not None:
        grads.norm_weight = (dread * read.norm.unit).sum(1, keepdim=True)
        grads.norm_bias = dread.sum(1, keepdim=True)
        dz = read.norm.pull(dread * affine.weight)
    for i in range(len(stacks) - 1, -1, -1):
        one, h, x, v, stack = scalars[i], read.inputs[i], anchor.inputs[i], anchor.writes[i], stacks[i]
        across, gated = torch.bmm(dz, v.mT), scaled(dz, one.read)
        mixed = one.write * across
        dh = torch.bmm(gated, stack.flatten(1, 2)).baddbmm_(mixed, x)
        dgates = (read.parts[i] * dz.unsqueeze(2)).sum(-1)
        # carry and end belong to the update
        grads.scalars.insert(0, TileScalars(dgates, across.mul_(read.scores[i]), one.carry, one.end))
        grads.stacks.insert(0, torch.bmm(gated.mT, h).view(stack.shape))
        grads.writes.insert(0, torch.bmm(read.mixed[i].mT, dz))
        grads.inputs.insert(0, torch.bmm(mixed.mT, h))
        dz = torch.ops.aten.gelu_backward.default(dh, read.pre[i - 1]) if i else dh
    grads.query = dz
    return grads


def update_backward(i: int, dafter: Tensor, stack: Tensor, one: TileScalars, anchor: Anchor, grads: TileGrads) -> None:
    """U of matrix i: linear in dafter, the gradient of [W; S] after the tile; leaves that at its start in `grads`."""
    x, v, to = anchor.inputs[i], anchor.writes[i], grads.scalars[i]
    rows, flat = dafter.flatten(1, 2), dafter.flatten(2)
    at = torch.bmm(x, rows.mT).unflatten(-1, stack.shape[1:3])
    to.end = (at * v.unsqueeze(2)).sum(-1)
    to.carry = torch.bmm(flat, stack.flatten(2).mT)
    for r in range(stack.shape[1]):
        grads.writes[i].addcmul_(at[:, :, r], one.end[..., r : r + 1])
    grads.inputs[i].baddbmm_(scaled(v, one.end), rows)
    grads.stacks[i].flatten(2).baddbmm_(one.carry.mT, flat)


@dataclass
class AnchorGrads:
    """Gradients that leave the tile through its anchor: dA per matrix, and the tokens'."""

    weights: list[Tensor]
    key: Tensor
    target: Tensor
    delta: Tensor | None


def anchor_backward(
    rule: Rule, weights: list[Tensor], affine: Affine | None, tokens: TileTokens, anchor: Anchor, grads: TileGrads
) -> AnchorGrads:
    """A: the double backward, from dV and dX of every matrix (consumed) to the anchor's weights and the tokens."""
    last = len(weights) - 1
    dinto: list[Tensor] = []
    dpre: list[Tensor] = []
    for i in range(last):
        dinto.append(grads.writes[i] * anchor.slopes[i])
        dpre.append(_through_slope(grads.writes[i], anchor.into[i], anchor.pre[i]))
        grads.writes[i + 1].baddbmm_(dinto[i], weights[i + 1].mT)
    dz, dtarget, ddelta = _top_backward(rule, affine, tokens, anchor, grads)
    dweights: list[Tensor] = []
    for i in range(last, -1, -1):
        dweight = torch.bmm(dz.mT, anchor.inputs[i])
        dweights.insert(0, dweight.baddbmm_(anchor.writes[i].mT, dinto[i - 1]) if i else dweight)
        grads.inputs[i].baddbmm_(dz, weights[i])
        if i:
            dz = dpre[i - 1].addcmul_(grads.inputs[i], anchor.slopes[i - 1])
    return AnchorGrads(dweights, grads.inputs[0], dtarget, ddelta)


def _through_slope(dwrite: Tensor, into: Tensor, z: Tensor) -> Tensor:
    """dwrite (consumed) * into * gelu''(z); gelu''(z) = phi(z) (2 - z^2) = CURVATURE p exp(p), p = 1 - z^2 / 2."""
    p = torch.ones_like(z).addcmul_(z, z, value=-0.5)
    return dwrite.mul_(into).mul_(p).mul_(p.exp_()).mul_(CURVATURE)


def _top_backward(
    rule: Rule, affine: Affine | None, tokens: TileTokens, anchor: Anchor, grads: TileGrads
) -> tuple[Tensor, Tensor, Tensor | None]:
    """From dV of the last matrix back through the LN's pull, the objective and the LN: (dZ, dtarget, ddelta)."""
    dtop, norm = grads.writes[-1].neg_(), anchor.norm
    pullback = OBJECTIVES[rule.objective].pullback
    if norm is None or affine is None:
        derror, dtarget, ddelta = pullback(rule, dtop, anchor.residual_error, tokens.target, tokens.delta)
        return derror, dtarget - derror, ddelta
    unit, weighted, dweighted = norm.unit, anchor.signal * affine.weight, norm.pull(dtop)
    dsignal = dweighted * affine.weight
    derror, dtarget, ddelta = pullback(rule, dsignal, anchor.residual_error, tokens.target, tokens.delta)
    assert grads.norm_weight is not None and grads.norm_bias is not None
    grads.norm_weight += dweighted.mul_(anchor.signal).addcmul_(derror, unit).sum(1, keepdim=True)
    grads.norm_bias += derror.sum(1, keepdim=True)
    return _pull_backward(norm, weighted, dtop, anchor.writes[-1], derror * affine.weight), dtarget - derror, ddelta


def _pull_backward(norm: Normalised, weighted: Tensor, dtop: Tensor, top: Tensor, dunit: Tensor) -> Tensor:
    """dZ of N = LN(Z) and U = s (P - mean(P) - N mean(P N)), from dU = dtop and dN (consumed); P weighted, -U top."""
    unit, rstd, width = norm.unit, norm.rstd, dtop.shape[-1]
    drow = dtop * rstd
    dunit.addcmul_(drow, (weighted * unit).mean(-1, keepdim=True), value=-1.0)
    dunit.addcmul_(weighted, (drow * unit).mean(-1, keepdim=True), value=-1.0)
    along = (drow * top).sum(-1, keepdim=True)
    return norm.pull(dunit).addcmul_(unit, along, value=1.0 / width)
