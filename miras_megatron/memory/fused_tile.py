"""One tile of a network memory, forward and backward written out by hand (deep_memory 1 and 2), any depth.

Heads and batch are one dim n; rows are tokens; matrix i maps in_i to out_i, the input matrix is 0. R, U and A are
the three parts of the backward: read side, update side, anchor (a double backward). No autograd in here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu

from .fused_scalars import TileScalars
from .objectives import OBJECTIVES
from .rules import Rule

LAYER_NORM_EPS = 1e-5


@dataclass
class TileTokens:
    """key, query [n, c, F]; target, delta [n, c, D]."""

    key: Tensor
    query: Tensor
    target: Tensor
    delta: Tensor | None


@dataclass
class Affine:
    """The memory's LN: weight, bias [n, 1, D]."""

    weight: Tensor
    bias: Tensor


@dataclass
class Normalised:
    """LN without affine part of some rows: unit [n, c, D] and 1 / std [n, c, 1]."""

    unit: Tensor
    rstd: Tensor

    @classmethod
    def of(cls, z: Tensor) -> Normalised:
        unit, _, rstd = torch.native_layer_norm(z, [z.shape[-1]], None, None, LAYER_NORM_EPS)
        return cls(unit, rstd)

    def pull(self, grad: Tensor) -> Tensor:
        """The transposed Jacobian: s (d - mean(d) - N mean(d N))."""
        mean, along = grad.mean(-1, keepdim=True), (grad * self.unit).mean(-1, keepdim=True)
        return torch.addcmul(grad - mean, self.unit, along, value=-1.0).mul_(self.rstd)


@dataclass
class Anchor:
    """What the anchor's forward leaves: pre-activations Z_i (i < L-1), inputs X_i, errors U_i, the LN, the error e.

    scaled P = g(e) gamma; into[i] = the gradient at hidden activation i before gelu'
    """

    pre: list[Tensor]
    inputs: list[Tensor]
    errors: list[Tensor]
    into: list[Tensor]
    norm: Normalised | None
    residual_error: Tensor
    signal: Tensor


def slope_times(grad: Tensor, z: Tensor) -> Tensor:
    """grad * gelu'(z)."""
    return torch.ops.aten.gelu_backward(grad, z)


def curvature(z: Tensor) -> Tensor:
    """gelu''(z) = phi(z) (2 - z^2)."""
    square = z * z
    return torch.exp(-0.5 * square).mul_(2.0 - square).mul_(1.0 / math.sqrt(2.0 * math.pi))


def anchor_forward(rule: Rule, weights: list[Tensor], affine: Affine | None, tokens: TileTokens) -> Anchor:
    """Inner gradients U_i X_i^T of the tile's tokens at the chunk's first weights."""
    inputs, pre, last = [tokens.key], [], len(weights) - 1
    for i in range(last):
        pre.append(inputs[i] @ weights[i].mT)
        inputs.append(gelu(pre[i]))
    out = inputs[last] @ weights[last].mT
    norm = None if affine is None else Normalised.of(out)
    prediction = out if norm is None or affine is None else torch.addcmul(affine.bias, norm.unit, affine.weight)
    residual_error = prediction - tokens.target
    signal = OBJECTIVES[rule.objective].signal(rule, residual_error, tokens.target, tokens.delta)
    top = signal if norm is None or affine is None else norm.pull(signal * affine.weight)
    errors, into = [top], []
    for i in range(last, 0, -1):
        into.insert(0, errors[0] @ weights[i])
        errors.insert(0, slope_times(into[0], pre[i - 1]))
    return Anchor(pre, inputs, errors, into, norm, residual_error, signal)


@dataclass
class Read:
    """What the read's forward leaves: inputs h_i, pre-activations Zq_i, scores h X^T, the LN."""

    inputs: list[Tensor]
    pre: list[Tensor]
    scores: list[Tensor]
    norm: Normalised | None


def read_forward(
    weights: list[Tensor],
    momenta: list[Tensor],
    scalars: list[TileScalars],
    anchor: Anchor,
    affine: Affine | None,
    query: Tensor,
) -> tuple[Tensor, Read]:
    """net reads with the running weights of every token; weights, momenta at the tile's start."""
    h, read = query, Read([], [], [], None)
    for i, weight in enumerate(weights):
        h = gelu(h) if i else h
        one, scores = scalars[i], h @ anchor.inputs[i].mT
        z = (h @ weight.mT).mul_(one.keep)
        if one.start is not None:
            z.addcmul_(h @ momenta[i].mT, one.start)
        z.baddbmm_(one.write * scores, anchor.errors[i], alpha=-1.0)
        read.inputs.append(h)
        read.scores.append(scores)
        read.pre.append(z)
        h = z
    if affine is None:
        return h, read
    read.norm = Normalised.of(h)
    return torch.addcmul(affine.bias, read.norm.unit, affine.weight), read


def update_forward(
    weight: Tensor, momentum: Tensor | None, one: TileScalars, errors: Tensor, inputs: Tensor
) -> tuple[Tensor, Tensor | None]:
    """W and S after the tile."""
    write = one.write[:, -1].unsqueeze(-1)
    end = torch.baddbmm(weight * one.keep[:, -1:], (errors * write).mT, inputs, alpha=-1.0)
    if momentum is None or one.start is None or one.momentum_keep is None or one.momentum_write is None:
        return end, None
    end.addcmul_(momentum, one.start[:, -1:])
    left = torch.baddbmm(momentum * one.momentum_keep, (errors * one.momentum_write).mT, inputs, alpha=-1.0)
    return end, left


@dataclass
class TileGrads:
    """Gradients gathered over R, U and A: per matrix dU, dX (inputs), dW, dS at the tile's start; tokens; LN affine."""

    errors: list[Tensor]
    inputs: list[Tensor]
    weights: list[Tensor]
    momenta: list[Tensor | None]
    scalars: list[TileScalars]
    query: Tensor
    norm_weight: Tensor | None
    norm_bias: Tensor | None


def read_backward(
    dread: Tensor,
    weights: list[Tensor],
    momenta: list[Tensor],
    scalars: list[TileScalars],
    anchor: Anchor,
    affine: Affine | None,
    read: Read,
) -> TileGrads:
    """R: from dl/d(net reads). Holds no incoming state gradient."""
    count = len(weights)
    blank: list[Tensor] = [dread] * count
    grads = TileGrads(blank[:], blank[:], blank[:], [None] * count, list(scalars), dread, None, None)
    dz = dread
    if affine is not None and read.norm is not None:
        grads.norm_weight = (dread * read.norm.unit).sum(1, keepdim=True)
        grads.norm_bias = dread.sum(1, keepdim=True)
        dz = read.norm.pull(dread * affine.weight)
    for i in range(count - 1, -1, -1):
        one, h, x, u, scores = scalars[i], read.inputs[i], anchor.inputs[i], anchor.errors[i], read.scores[i]
        across = dz @ u.mT
        dwrite = (across * scores).neg_()
        mixed = one.write * across
        through = dz @ weights[i]
        dkeep = (through * h).sum(-1, keepdim=True)
        dh = through.mul_(one.keep).baddbmm_(mixed, x, alpha=-1.0)
        grads.weights[i] = (dz * one.keep).mT @ h
        dstart = None
        if one.start is not None:
            late = dz @ momenta[i]
            dstart = (late * h).sum(-1, keepdim=True)
            dh.addcmul_(late, one.start)
            grads.momenta[i] = (dz * one.start).mT @ h
        grads.errors[i] = ((one.write * scores).mT @ dz).neg_()
        grads.inputs[i] = (mixed.mT @ h).neg_()
        grads.scalars[i] = TileScalars(dkeep, dstart, dwrite, None, None)
        if i:
            dz = slope_times(dh, read.pre[i - 1])
        else:
            grads.query = dh
    return grads


def update_backward(
    i: int,
    dweight: Tensor,
    dmomentum: Tensor | None,
    weight: Tensor,
    momentum: Tensor | None,
    one: TileScalars,
    anchor: Anchor,
    grads: TileGrads,
) -> None:
    """U of matrix i: linear in the gradients of W and S after the tile; leaves those at its start in `grads`."""
    x, u, to = anchor.inputs[i], anchor.errors[i], grads.scalars[i]
    last = one.write[:, -1].unsqueeze(-1)
    at_errors, at_inputs = x @ dweight.mT, u @ dweight
    to.write[:, -1] -= (u * at_errors).sum(-1)
    grads.errors[i].addcmul_(at_errors, last, value=-1.0)
    grads.inputs[i].addcmul_(at_inputs, last, value=-1.0)
    to.keep[:, -1] += (dweight * weight).sum((-2, -1)).unsqueeze(-1)
    grads.weights[i].addcmul_(dweight, one.keep[:, -1:])
    if momentum is None or dmomentum is None or one.start is None or to.start is None:
        return
    assert one.momentum_keep is not None and one.momentum_write is not None
    at_errors, at_inputs = x @ dmomentum.mT, u @ dmomentum
    to.momentum_write = (u * at_errors).sum(-1, keepdim=True).neg_()
    grads.errors[i].addcmul_(at_errors, one.momentum_write, value=-1.0)
    grads.inputs[i].addcmul_(at_inputs, one.momentum_write, value=-1.0)
    to.start[:, -1] += (dweight * momentum).sum((-2, -1)).unsqueeze(-1)
    to.momentum_keep = (dmomentum * momentum).sum((-2, -1), keepdim=True)
    dstart = grads.momenta[i]
    assert dstart is not None
    dstart.addcmul_(dweight, one.start[:, -1:]).addcmul_(dmomentum, one.momentum_keep)


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
    """A: the double backward, from dU and dX of every matrix (consumed) to the anchor's weights and the tokens."""
    last = len(weights) - 1
    dweights: list[Tensor] = [grads.query] * len(weights)
    dpre: list[Tensor] = []
    for i in range(last):
        dinto = slope_times(grads.errors[i], anchor.pre[i])
        dpre.append(grads.errors[i].mul_(anchor.into[i]).mul_(curvature(anchor.pre[i])))
        grads.errors[i + 1].baddbmm_(dinto, weights[i + 1].mT)
        dweights[i + 1] = anchor.errors[i + 1].mT @ dinto
    dz, dtarget, ddelta = _top_backward(rule, affine, tokens, anchor, grads)
    for i in range(last, -1, -1):
        grads.inputs[i].baddbmm_(dz, weights[i])
        dweight = dz.mT @ anchor.inputs[i]
        dweights[i] = dweight if i == 0 else dweights[i].add_(dweight)
        if i:
            dz = dpre[i - 1].add_(slope_times(grads.inputs[i], anchor.pre[i - 1]))
    return AnchorGrads(dweights, grads.inputs[0], dtarget, ddelta)


def _top_backward(
    rule: Rule, affine: Affine | None, tokens: TileTokens, anchor: Anchor, grads: TileGrads
) -> tuple[Tensor, Tensor, Tensor | None]:
    """From dU of the last matrix back through the LN's pull, the objective and the LN: (dZ, dtarget, ddelta)."""
    dtop, norm = grads.errors[-1], anchor.norm
    pullback = OBJECTIVES[rule.objective].pullback
    if norm is None or affine is None:
        derror, dtarget, ddelta = pullback(rule, dtop, anchor.residual_error, tokens.target, tokens.delta)
        return derror, dtarget - derror, ddelta
    unit, scaled, width = norm.unit, anchor.signal * affine.weight, dtop.shape[-1]
    along_mean = (scaled * unit).mean(-1, keepdim=True)
    drow = norm.rstd * dtop
    drow_along = (drow * unit).mean(-1, keepdim=True)
    dscaled = drow - drow.mean(-1, keepdim=True) - unit * drow_along
    dsignal = dscaled * affine.weight
    derror, dtarget, ddelta = pullback(rule, dsignal, anchor.residual_error, tokens.target, tokens.delta)
    assert grads.norm_weight is not None and grads.norm_bias is not None
    grads.norm_weight += (dscaled * anchor.signal + derror * unit).sum(1, keepdim=True)
    grads.norm_bias += derror.sum(1, keepdim=True)
    dunit = derror * affine.weight - along_mean * drow - scaled * drow_along
    drstd = (dtop * anchor.errors[-1]).sum(-1, keepdim=True) / norm.rstd
    dz = norm.pull(dunit) - unit * (drstd * norm.rstd.square() / width)
    return dz, dtarget - derror, ddelta
