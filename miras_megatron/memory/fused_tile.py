"""One tile of a network memory, forward, written out by hand (deep_memory 1), any depth; backward in fused_backward.

Heads and batch are one dim n; rows are tokens; matrix i maps in_i to out_i, the input matrix is 0. A matrix's state
is stacked, [n, r, out, in]: W, and below it S where the rule has momentum. What is kept of gradients is what gets
written, V_i = -dl/dZ_i, so that everything after it is added.
"""

from __future__ import annotations

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
    """LN without affine part of rows z [n, c, D]: unit N [n, c, D], mean and s = 1 / std [n, c, 1]."""

    z: Tensor
    unit: Tensor
    mean: Tensor
    rstd: Tensor

    @classmethod
    def of(cls, z: Tensor) -> Normalised:
        return cls(z, *torch.native_layer_norm(z, z.shape[-1:], None, None, LAYER_NORM_EPS))

    def pull(self, grad: Tensor) -> Tensor:
        """The transposed Jacobian: s (d - mean(d) - N mean(d N))."""
        backward = torch.ops.aten.native_layer_norm_backward.default
        shape, wanted = self.z.shape[-1:], (True, False, False)
        found: Tensor = backward(grad, self.z, shape, self.mean, self.rstd, None, None, wanted)[0]
        return found


@dataclass
class Anchor:
    """What the anchor's forward leaves: Z_i and gelu'(Z_i) (i < L-1), inputs X_i, writes V_i, the LN, the error e.

    into[i] = V_{i+1} W_{i+1}, what arrives at hidden activation i; signal = g(e)
    """

    pre: list[Tensor]
    slopes: list[Tensor]
    inputs: list[Tensor]
    writes: list[Tensor]
    into: list[Tensor]
    norm: Normalised | None
    residual_error: Tensor
    signal: Tensor


def slope(z: Tensor) -> Tensor:
    """gelu'(z)."""
    found: Tensor = torch.ops.aten.gelu_backward.default(torch.ones_like(z), z)
    return found


def anchor_forward(rule: Rule, weights: list[Tensor], affine: Affine | None, tokens: TileTokens) -> Anchor:
    """Inner gradients -V_i X_i^T of the tile's tokens at the chunk's first weights [n, out, in]."""
    inputs = [tokens.key]
    pre: list[Tensor] = []
    for weight in weights[:-1]:
        pre.append(torch.bmm(inputs[-1], weight.mT))
        inputs.append(gelu(pre[-1]))
    out = torch.bmm(inputs[-1], weights[-1].mT)
    norm = None if affine is None else Normalised.of(out)
    prediction = out if norm is None or affine is None else torch.addcmul(affine.bias, norm.unit, affine.weight)
    error = prediction - tokens.target
    signal = OBJECTIVES[rule.objective].signal(rule, error, tokens.target, tokens.delta)
    top = -signal if norm is None or affine is None else norm.pull(signal * affine.weight).neg_()
    slopes = [slope(z) for z in pre]
    writes, into = [top], []
    for weight, steep in zip(weights[:0:-1], slopes[::-1], strict=True):
        into.append(torch.bmm(writes[-1], weight))
        writes.append(into[-1] * steep)
    return Anchor(pre, slopes, inputs, writes[::-1], into[::-1], norm, error, signal)


def scaled(rows: Tensor, by: Tensor) -> Tensor:
    """[by_0 . rows | by_1 . rows]: rows [n, c, out], by [n, c, r] -> [n, c, r out]."""
    return (rows.unsqueeze(2) * by.unsqueeze(-1)).flatten(2)


@dataclass
class Read:
    """What the read's forward leaves, per matrix: inputs h, parts R h [n, c, r, out], scores h X^T, mixed G * scores.

    pre: what each matrix gave, before gelu
    """

    inputs: list[Tensor]
    parts: list[Tensor]
    scores: list[Tensor]
    mixed: list[Tensor]
    pre: list[Tensor]
    norm: Normalised | None


def read_forward(
    stacks: list[Tensor], scalars: list[TileScalars], anchor: Anchor, affine: Affine | None, query: Tensor
) -> tuple[Tensor, Read]:
    """Net reads with the running weights of every token; stacks at the tile's start."""
    z, read = query, Read([], [], [], [], [], None)
    for i, (stack, one) in enumerate(zip(stacks, scalars, strict=True)):
        h = gelu(z) if i else z
        parts = torch.bmm(h, stack.flatten(1, 2).mT).unflatten(-1, stack.shape[1:3])
        scores = torch.bmm(h, anchor.inputs[i].mT)
        mixed = one.write * scores
        z = _combine(parts, one.read).baddbmm_(mixed, anchor.writes[i])
        for kept, x in zip((read.inputs, read.parts, read.scores, read.mixed), (h, parts, scores, mixed), strict=True):
            kept.append(x)
        read.pre.append(z)
    if affine is None:
        return z, read
    read.norm = Normalised.of(z)
    return torch.addcmul(affine.bias, read.norm.unit, affine.weight), read


def _combine(parts: Tensor, by: Tensor) -> Tensor:
    """sum over r of by_r . parts_r: [n, c, r, out], [n, c, r] -> [n, c, out]."""
    total = parts[:, :, 0] * by[..., :1]
    for r in range(1, by.shape[-1]):
        total.addcmul_(parts[:, :, r], by[..., r : r + 1])
    return total


def update_forward(stack: Tensor, one: TileScalars, writes: Tensor, inputs: Tensor) -> Tensor:
    """[W; S] after the tile."""
    carried = torch.bmm(one.carry, stack.flatten(2)).view(stack.shape[0], -1, stack.shape[-1])
    return carried.baddbmm_(scaled(writes, one.end).mT, inputs).view(stack.shape)
