"""One tile of a network memory, backward (deep_memory 2): R, U and A, the read, the update and the anchor.

The anchor's part is a double backward. No autograd in here; names and shapes as in fused_tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .fused_scalars import TileScalars
from .fused_tile import GELU_BACKWARD, Affine, Anchor, Normalised, Read, TileTokens, scaled
from .fused_workspace import Workspace
from .objectives import OBJECTIVES
from .rules import Rule

CURVATURE = 2.0 / math.sqrt(2.0 * math.pi) / math.e


@dataclass
class TileGrads:
    """Gathered over R, U and A: per matrix dV, dX, d[W; S] at the tile's start and its scalars; dq; the LN's.

    stacks and scalars are written into what the caller gives
    """

    writes: list[Tensor]
    inputs: list[Tensor]
    stacks: list[Tensor]
    scalars: list[TileScalars]
    query: Tensor
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None


def update_backward(
    i: int, dafter: Tensor, stack: Tensor, one: TileScalars, anchor: Anchor, grads: TileGrads, scratch: Workspace
) -> None:
    """U of matrix i: linear in dafter, the gradient of [W; S] after the tile; writes d[W; S] at its start."""
    x, v, to = anchor.inputs[i], anchor.writes[i], grads.scalars[i]
    rows, flat = dafter.flatten(1, 2), dafter.flatten(2)
    torch.bmm(one.carry.mT, flat, out=grads.stacks[i].flatten(2))
    to.carry.copy_(torch.bmm(flat, stack.flatten(2).mT))
    at = scratch.bmm("parts", i, x, rows.mT).unflatten(-1, stack.shape[1:3])
    dwrite = torch.mul(at[:, :, 0], one.end[..., :1], out=scratch.take("dwrite", i, *v.shape))
    for r in range(1, stack.shape[1]):
        dwrite.addcmul_(at[:, :, r], one.end[..., r : r + 1])
    torch.sum(at.mul_(v.unsqueeze(2)), -1, out=to.end)
    # `at` is done with
    grads.inputs.append(scratch.bmm("dinput", i, scaled(v, one.end, at), rows))
    grads.writes.append(dwrite)


def read_backward(
    dread: Tensor,
    stacks: list[Tensor],
    scalars: list[TileScalars],
    anchor: Anchor,
    affine: Affine | None,
    read: Read,
    grads: TileGrads,
    scratch: Workspace,
) -> None:
    """R: from dl/d(net reads), added to what U left."""
    dz = dread
    if affine is not None and read.norm is not None:
        grads.norm_weight = (dread * read.norm.unit).sum(1, keepdim=True)
        grads.norm_bias = dread.sum(1, keepdim=True)
        dz = read.norm.pull(dread * affine.weight)
    for i in range(len(stacks) - 1, -1, -1):
        one, h, to, parts = scalars[i], read.inputs[i], grads.scalars[i], read.parts[i]
        torch.sum(parts.mul_(dz.unsqueeze(2)), -1, out=to.read)
        # the parts are done with
        gated = scaled(dz, one.read, parts)
        across = scratch.bmm("across", i, dz, anchor.writes[i].mT)
        grads.writes[i].baddbmm_(read.mixed[i].mT, dz)
        mixed = torch.mul(one.write, across, out=read.mixed[i])
        torch.mul(across, read.scores[i], out=to.write)
        dh = scratch.bmm("dh", i, gated, stacks[i].flatten(1, 2)).baddbmm_(mixed, anchor.inputs[i])
        grads.stacks[i].flatten(1, 2).baddbmm_(gated.mT, h)
        grads.inputs[i].baddbmm_(mixed.mT, h)
        dz = GELU_BACKWARD(dh, read.pre[i - 1], grad_input=dh) if i else dh
    grads.query = dz


@dataclass
class AnchorGrads:
    """Gradients that leave the tile through its anchor to the tokens."""

    key: Tensor
    target: Tensor
    delta: Tensor | None


def anchor_backward(
    rule: Rule,
    weights: list[Tensor],
    affine: Affine | None,
    tokens: TileTokens,
    anchor: Anchor,
    slopes: list[Tensor],
    grads: TileGrads,
    dweights: list[Tensor],
    scratch: Workspace,
) -> AnchorGrads:
    """A: the double backward, from dV and dX of every matrix (consumed) to the tokens; adds the anchor's dweights."""
    last, dinto = len(weights) - 1, []
    for i, steep in enumerate(slopes):
        dinto.append(torch.mul(grads.writes[i], steep, out=scratch.take("dinto", i, *steep.shape)))
        grads.writes[i + 1].baddbmm_(dinto[i], weights[i + 1].mT)
    dz, dtarget, ddelta = _top_backward(rule, affine, tokens, anchor, grads)
    for i in range(last, -1, -1):
        dweights[i].baddbmm_(dz.mT, anchor.inputs[i])
        grads.inputs[i].baddbmm_(dz, weights[i])
        if i:
            dweights[i].baddbmm_(anchor.writes[i].mT, dinto[i - 1])
            bent = _bend(anchor.pre[i - 1], scratch.take("dh", i, *dinto[i - 1].shape))
            dwrite = grads.writes[i - 1].mul_(anchor.into[i - 1])
            dz = grads.inputs[i].mul_(slopes[i - 1]).addcmul_(dwrite, bent, value=CURVATURE)
    return AnchorGrads(grads.inputs[0], dtarget, ddelta)


def _bend(z: Tensor, out: Tensor) -> Tensor:
    """gelu''(z) / CURVATURE; gelu''(z) = phi(z) (2 - z^2) = CURVATURE p exp(p), p = 1 - z^2 / 2."""
    p = torch.addcmul(z.new_ones(()), z, z, value=-0.5, out=out)
    return p.mul_(p.exp())


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
