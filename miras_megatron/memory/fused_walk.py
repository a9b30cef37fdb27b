"""The walk of the hand-written scan over its tiles: one autograd Function, states kept every span.

Forward keeps the state only at the start of each span; backward walks the spans in reverse, recomputes a span's
states and inner gradients, and then its tiles in reverse.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .fused_backward import AnchorGrads, anchor_backward, read_backward, update_backward
from .fused_plan import Arguments, Plan, Tile, same_gates
from .fused_scalars import Scalars, TileScalars, scalars_backward, tile_scalars
from .fused_tile import Anchor, TileTokens, anchor_forward, read_forward, update_forward


@dataclass
class State:
    """Per matrix: the running [W; S] as [n, r, out, in], and the chunk's first W [n, out, in]."""

    stacks: list[Tensor]
    anchor: list[Tensor]

    @classmethod
    def first(cls, arguments: Arguments) -> State:
        rows = zip(arguments.weights, arguments.momenta, strict=True) if arguments.momenta else zip(arguments.weights)
        return cls([torch.stack(one, 1) for one in rows], arguments.anchor)

    def at(self, tile: Tile) -> State:
        """The state with which a tile is walked: where a chunk opens, its anchor is the running W."""
        return State(self.stacks, [stack[:, 0] for stack in self.stacks]) if tile.opens else self

    def after(self, scalars: list[TileScalars], anchor: Anchor) -> State:
        parts = zip(self.stacks, scalars, anchor.writes, anchor.inputs, strict=True)
        return State([update_forward(*one) for one in parts], self.anchor)


@dataclass
class _Step:
    """One tile of a run: its tokens and each matrix's scalars."""

    tile: Tile
    tokens: TileTokens
    scalars: list[TileScalars]


@dataclass
class _Run:
    """Neighbouring tiles of one length in a span; scalars per matrix for all of them."""

    scalars: list[Scalars]
    steps: list[_Step]
    cut: slice


def _runs(plan: Plan, arguments: Arguments, span: Sequence[Tile]) -> list[_Run]:
    runs = []
    for size, group in itertools.groupby(span, key=lambda tile: tile.stop - tile.start):
        tiles = list(group)
        cut = slice(tiles[0].start, tiles[-1].stop)
        scalars = _run_scalars(arguments, cut, size)
        by_matrix = [one.tiles() for one in scalars]
        tokens = _run_tokens(plan, arguments, cut, size)
        steps = [_Step(tile, tokens[j], [one[j] for one in by_matrix]) for j, tile in enumerate(tiles)]
        runs.append(_Run(scalars, steps, cut))
    return runs


def _fold(x: Tensor | None, cut: slice, size: int) -> Tensor | None:
    """[B, T, N, ...] -> tiles of the cut, heads first, [n, J, size, ...]."""
    return None if x is None else _heads_first(x[:, cut]).unflatten(1, (-1, size))


def _heads_first(x: Tensor) -> Tensor:
    """[B, T, N, ...] -> [n, T, ...], a copy."""
    return x.transpose(1, 2).flatten(0, 1)


def _heads_last(x: Tensor, like: Tensor) -> Tensor:
    """[n, T, ...] -> [B, T, N, ...], a view."""
    return x.unflatten(0, (like.shape[0], -1)).transpose(1, 2)


def _run_scalars(arguments: Arguments, cut: slice, size: int) -> list[Scalars]:
    scalars: list[Scalars] = []
    for i, (log_keep, momentum, lr) in enumerate(arguments.gates):
        twin = next((j for j in range(i) if same_gates(arguments.gates[j], arguments.gates[i])), None)
        if twin is not None:
            scalars.append(scalars[twin])
            continue
        rate = _fold(lr, cut, size)
        assert rate is not None
        scalars.append(tile_scalars(_fold(log_keep, cut, size), _fold(momentum, cut, size), rate))
    return scalars


def _run_tokens(plan: Plan, arguments: Arguments, cut: slice, size: int) -> list[TileTokens]:
    wanted = (arguments.key, arguments.query, arguments.value, arguments.delta)
    key, query, target, delta = (_fold(x, cut, size) for x in wanted)
    assert key is not None and query is not None and target is not None
    if plan.folds_residual and plan.rule.objective != "dot":
        target = target - key
    deltas = [None] * key.shape[1] if delta is None else delta.unbind(1)
    return [TileTokens(*one) for one in zip(key.unbind(1), query.unbind(1), target.unbind(1), deltas, strict=True)]


class FusedScan(torch.autograd.Function):
    """(plan, flat arguments) -> reads [B, T, N, D], W and S after the last token, and the open chunk's anchor."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *flat: Tensor) -> tuple[Tensor, ...]:
        arguments = Arguments.unpack(plan, flat)
        state, affine = State.first(arguments), arguments.affine()
        reads = torch.empty_like(arguments.value, memory_format=torch.contiguous_format)
        kept: list[State] = []
        for span in plan.spans:
            kept.append(state)
            for step in (step for run in _runs(plan, arguments, span) for step in run.steps):
                state = state.at(step.tile)
                anchor = anchor_forward(plan.rule, state.anchor, affine, step.tokens)
                read, _ = read_forward(state.stacks, step.scalars, anchor, affine, step.tokens.query)
                read = read + step.tokens.query if plan.folds_residual else read
                reads[:, step.tile.start : step.tile.stop] = _heads_last(read, reads)
                state = state.after(step.scalars, anchor)
        ctx.plan, ctx.kept = plan, kept[1:]
        ctx.save_for_backward(*flat)
        # cloned: kept states are views of these, and an output that the node itself holds would be a cycle
        rows = [stack[:, r].clone() for r in range(1 + bool(arguments.momenta)) for stack in state.stacks]
        anchors = [x.clone() for x in state.anchor] if plan.leaves_anchor else []
        return (reads, *rows, *anchors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        plan, arguments = ctx.plan, Arguments.unpack(ctx.plan, ctx.saved_tensors)
        kept = [State.first(arguments), *ctx.kept]
        backward = _Backward(plan, arguments, grads)
        for span in reversed(plan.spans):
            backward.span(span, kept.pop())
        return (None, *backward.result().pack())


class _Backward:
    """The reverse walk: gradients of the running state go from tile to tile, all others are gathered."""

    def __init__(self, plan: Plan, arguments: Arguments, grads: Sequence[Any]) -> None:
        self.plan, self.arguments, self.affine = plan, arguments, arguments.affine()
        depth, self.dreads = plan.depth, grads[0]

        def known(grad: Any, like: Tensor) -> Tensor:
            return torch.zeros_like(like) if grad is None else grad

        own = [*arguments.weights, *arguments.momenta]
        rows = [known(g, x) for g, x in zip(grads[1 : 1 + len(own)], own, strict=True)]
        self.dstacks = [torch.stack(rows[i::depth], 1) for i in range(depth)]
        last = grads[-depth:] if plan.leaves_anchor else [None] * depth
        self.danchor = [known(g, x).clone() for g, x in zip(last, arguments.weights, strict=True)]
        blank = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in arguments.pack()]
        self.gathered = Arguments.unpack(plan, blank)

    def span(self, span: Sequence[Tile], state: State) -> None:
        """Recompute the span's states and inner gradients, then take its tiles in reverse."""
        runs, known = _runs(self.plan, self.arguments, span), []
        for step in (step for run in runs for step in run.steps):
            state = state.at(step.tile)
            anchor = anchor_forward(self.plan.rule, state.anchor, self.affine, step.tokens)
            known.append((state, anchor))
            state = state.after(step.scalars, anchor)
        for run in reversed(runs):
            found = [self.tile(step, *known.pop()) for step in reversed(run.steps)]
            self._gates(run, found[::-1])

    def tile(self, step: _Step, state: State, anchor: Anchor) -> list[TileScalars]:
        """R, U and A of one tile; returns the gradients of its scalars."""
        cut, stacks, scalars = slice(step.tile.start, step.tile.stop), state.stacks, step.scalars
        _, read = read_forward(stacks, scalars, anchor, self.affine, step.tokens.query)
        dread = _heads_first(self.dreads[:, cut])
        grads = read_backward(dread, stacks, scalars, anchor, self.affine, read)
        for i, stack in enumerate(stacks):
            update_backward(i, self.dstacks[i], stack, scalars[i], anchor, grads)
        out = anchor_backward(self.plan.rule, state.anchor, self.affine, step.tokens, anchor, grads)
        self.dstacks, to = grads.stacks, self.gathered
        self._tokens(cut, dread, grads.query, out)
        if to.norm_weight is not None:
            to.norm_weight += grads.norm_weight
            to.norm_bias += grads.norm_bias
        self._anchor(step.tile, out.weights)
        return grads.scalars

    def _tokens(self, cut: slice, dread: Tensor, dquery: Tensor, out: AnchorGrads) -> None:
        """The tile's token gradients, with the residual's share: y = net(q) + q, target = v - k."""
        to, dkey = self.gathered, out.key
        if self.plan.folds_residual:
            dquery = dquery + dread
            dkey = dkey if self.plan.rule.objective == "dot" else dkey - out.target
        pairs = ((to.query, dquery), (to.key, dkey), (to.value, out.target), (to.delta, out.delta))
        for total, one in pairs:
            if total is not None and one is not None:
                total[:, cut] = _heads_last(one, total)

    def _anchor(self, tile: Tile, dweights: list[Tensor]) -> None:
        """The anchor's gradient gathers over a chunk's tiles and joins W's where the chunk opens."""
        if tile.opens and tile.ends:
            for stack, one in zip(self.dstacks, dweights, strict=True):
                stack[:, 0] += one
            return
        for total, one in zip(self.danchor, dweights, strict=True):
            total += one
        if tile.opens:
            for stack, total in zip(self.dstacks, self.danchor, strict=True):
                stack[:, 0] += total
                total.zero_()

    def _gates(self, run: _Run, found: list[list[TileScalars]]) -> None:
        for i, gates in enumerate(self.gathered.gates):
            grads = scalars_backward(run.scalars[i], [one[i] for one in found])
            for to, grad in zip(gates, grads, strict=True):
                if to is not None and grad is not None:
                    to[:, run.cut] = _heads_last(grad.flatten(1), to)

    def result(self) -> Arguments:
        """All gradients, in the arguments' order."""
        rows = [stack.unbind(1) for stack in self.dstacks]
        self.gathered.weights = [row[0] for row in rows]
        self.gathered.momenta = [row[1] for row in rows] if self.arguments.momenta else []
        self.gathered.anchor = self.danchor
        return self.gathered
