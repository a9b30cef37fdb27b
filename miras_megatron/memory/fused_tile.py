"""One tile of a network memory, forward, written out by hand (deep_memory 1), any depth; backward in fused_backward.

Heads and batch are one dim n; rows are tokens; matrix i maps in_i to out_i, the input matrix is 0. A matrix's state
is stacked, [n, r, out, in]: W, and below it S where the rule has momentum. What is kept of gradients is what gets
written, V_i = -dl/dZ_i, so that everything after it is added.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .fused_scalars import TileScalars
from .fused_workspace import Workspace
from .objectives import OBJECTIVES
from .rules import Rule

LAYER_NORM_EPS = 1e-5
GELU = torch.ops.aten.gelu.out
GELU_BACKWARD = torch.ops.aten.gelu_backward.grad_input


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
    """The anchor's forward (deep_memory 1): inputs X_i, writes V_i, the LN, the error e and what tells them from Z.

    pre[i] = Z_{i+1} and into[i] = V_{i+1} W_{i+1}, what arrives at hidden activation i, stay valid for backward; X_i
    and V_i of hidden activations lie in scratch memory and are written anew by `refresh`. signal = g(e)
    """

    pre: list[Tensor]
    inputs: list[Tensor]
    writes: list[Tensor]
    into: list[Tensor]
    norm: Normalised | None
    residual_error: Tensor
    signal: Tensor


def slope(z: Tensor, out: Tensor) -> Tensor:
    """gelu'(z)."""
    found: Tensor = GELU_BACKWARD(torch.ones_like(z[:1, :1, :1]).expand_as(z), z, grad_input=out)
    return found


def anchor_forward(
    rule: Rule, weights: list[Tensor], affine: Affine | None, tokens: TileTokens, kept: Workspace, scratch: Workspace
) -> Anchor:
    """Inner gradients -V_i X_i^T of the tile's tokens at the chunk's first weights [n, out, in]."""
    inputs, pre = [tokens.key], []
    for i, weight in enumerate(weights[:-1]):
        pre.append(kept.bmm("pre", i, inputs[-1], weight.mT))
        inputs.append(GELU(pre[-1], out=scratch.take("input", i, *pre[-1].shape)))
    out = kept.bmm("out", 0, inputs[-1], weights[-1].mT)
    norm = None if affine is None else Normalised.of(out)
    prediction = out if norm is None or affine is None else torch.addcmul(affine.bias, norm.unit, affine.weight)
    error = prediction - tokens.target
    signal = OBJECTIVES[rule.objective].signal(rule, error, tokens.target, tokens.delta)
    top = -signal if norm is None or affine is None else norm.pull(signal * affine.weight).neg_()
    writes, into = [top], []
    for i in range(len(pre) - 1, -1, -1):
        into.append(kept.bmm("into", i, writes[-1], weights[i + 1]))
        writes.append(GELU_BACKWARD(into[-1], pre[i], grad_input=scratch.take("write", i, *pre[i].shape)))
    return Anchor(pre, inputs, writes[::-1], into[::-1], norm, error, signal)


def refresh(anchor: Anchor, scratch: Workspace) -> list[Tensor]:
    """Writes the hidden X_i and V_i of a kept tile anew, and returns gelu'(Z_i)."""
    slopes = [slope(z, scratch.take("slope", i, *z.shape)) for i, z in enumerate(anchor.pre)]
    for i, z in enumerate(anchor.pre):
        GELU(z, out=anchor.inputs[i + 1])
        torch.mul(anchor.into[i], slopes[i], out=anchor.writes[i])
    return slopes


def scaled(rows: Tensor, by: Tensor, out: Tensor) -> Tensor:
    """[by_0 . rows | by_1 . rows]: rows [n, c, out], by [n, c, r] -> [n, c, r out]."""
    torch.mul(rows.unsqueeze(2), by.unsqueeze(-1), out=out.view(*by.shape, -1))
    return out.flatten(2)


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
    stacks: list[Tensor],
    scalars: list[TileScalars],
    anchor: Anchor,
    affine: Affine | None,
    query: Tensor,
    scratch: Workspace,
) -> tuple[Tensor, Read]:
    """Net reads with the running weights of every token; stacks at the tile's start."""
    z, read = query, Read([], [], [], [], [], None)
    for i, (stack, one) in enumerate(zip(stacks, scalars, strict=True)):
        h = GELU(z, out=scratch.take("read input", i, *z.shape)) if i else z
        parts = scratch.bmm("parts", i, h, stack.flatten(1, 2).mT).unflatten(-1, stack.shape[1:3])
        scores = scratch.bmm("scores", i, h, anchor.inputs[i].mT)
        mixed = torch.mul(one.write, scores, out=scratch.take("mixed", i, *scores.shape))
        z = _combine(parts, one.read, scratch.take("read pre", i, *anchor.writes[i].shape))
        z.baddbmm_(mixed, anchor.writes[i])
        for kept, x in zip((read.inputs, read.parts, read.scores, read.mixed), (h, parts, scores, mixed), strict=True):
            kept.append(x)
        read.pre.append(z)
    if affine is None:
        return z, read
    read.norm = Normalised.of(z)
    return torch.addcmul(affine.bias, read.norm.unit, affine.weight), read


def _combine(parts: Tensor, by: Tensor, out: Tensor) -> Tensor:
    """sum over r of by_r . parts_r: [n, c, r, out], [n, c, r] -> [n, c, out]."""
    torch.mul(parts[:, :, 0], by[..., :1], out=out)
    for r in range(1, by.shape[-1]):
        out.addcmul_(parts[:, :, r], by[..., r : r + 1])
    return out


def update_forward(
    i: int, stack: Tensor, one: TileScalars, anchor: Anchor, kept: Workspace, scratch: Workspace
) -> Tensor:
    """[W; S] of matrix i after the tile, in `kept`."""
    writes, flat = anchor.writes[i], stack.flatten(2)
    after = kept.bmm("stack", i, one.carry, flat)
    ends = scaled(writes, one.end, scratch.take("parts", i, *writes.shape[:2], stack[0, :, :, 0].numel()))
    after.view(len(stack), -1, stack.shape[-1]).baddbmm_(ends.mT, anchor.inputs[i])
    return after.view(stack.shape)
