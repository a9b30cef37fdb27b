"""The hand-written scan of network memories under decay: forward and backward by `fused_tile`, states every span.

For rules whose stored variable is W itself, with head gates and gradients at the chunk's first weights: MLP
memories of any depth and the plain matrix, every objective, with and without momentum. Forward keeps the state
only at the start of each span of `every` chunks; backward walks the spans in reverse, recomputes a span's states
and inner gradients, and then its tiles in reverse. Nothing here is seen by autograd but the one Function.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .fused_scalars import Scalars, TileScalars, scalars_backward, tile_scalars
from .fused_tile import (
    Affine,
    Anchor,
    TileTokens,
    anchor_backward,
    anchor_forward,
    read_backward,
    read_forward,
    update_backward,
    update_forward,
)
from .rules import Rule
from .state import MemoryState, replace_state
from .tile import Tokens

TILE = 64
"""Tokens walked at once; never semantic."""


def takes_fused(rule: Rule, tokens: Tokens) -> bool:
    """Whether the hand-written scan computes this rule with these gates."""
    plain = rule.retention == "decay" and rule.gradient_at == "chunk" and rule.window == 1
    usual = rule.newton_schulz == "off" and rule.max_gradient_norm is None
    gates = [g for one in tokens.gates for g in (one.log_keep, one.momentum, one.lr) if g is not None]
    return plain and usual and all(gate.shape[-1] == 1 for gate in gates)


@dataclass(frozen=True)
class Tile:
    """Tokens start..stop-1; whether the tile opens and whether it ends its chunk."""

    start: int
    stop: int
    opens: bool
    ends: bool


@dataclass(frozen=True)
class Plan:
    """How one call is walked: the rule, its spans of tiles, and what the flat arguments hold."""

    rule: Rule
    spans: tuple[tuple[Tile, ...], ...]
    depth: int
    has_delta: bool
    has_norm: bool
    has_keep: tuple[bool, ...]
    leaves_anchor: bool


def plan_tiles(length: int, phase: int, chunk_size: int, every: int) -> tuple[tuple[Tile, ...], ...]:
    """The spans of `length` tokens that begin `phase` tokens inside a chunk."""
    spans: list[tuple[Tile, ...]] = []
    start, tiles = 0, []
    while start < length:
        at = (phase + start) % chunk_size
        stop = min(length, start + chunk_size - at, start + TILE)
        tiles.append(Tile(start, stop, at == 0, at + stop - start == chunk_size))
        start = stop
        if tiles[-1].ends and (phase + stop) % (chunk_size * every) == 0:
            spans.append(tuple(tiles))
            tiles = []
    return (*spans, tuple(tiles)) if tiles else tuple(spans)


def scan_fused(
    rule: Rule, params: dict[str, Tensor], tokens: Tokens, state: MemoryState, phase: int, chunk_size: int, every: int
) -> tuple[Tensor, MemoryState]:
    """Net reads [B, N, T, D] and the state after the tokens (its phase is the caller's to set)."""
    batch, heads, length = tokens.key.shape[:3]
    spans = plan_tiles(length, 0 if rule.exact else phase, chunk_size, every)
    tiles = [tile for span in spans for tile in span]
    reopened = any(tile.opens for tile in tiles)
    plan = Plan(
        rule,
        spans,
        rule.depth,
        tokens.delta is not None,
        rule.layer_norm,
        tuple(gates.log_keep is not None for gates in tokens.gates),
        reopened and not tiles[-1].ends and not rule.exact,
    )

    def flat(x: Tensor) -> Tensor:
        return x.flatten(0, 1)

    arguments = [flat(x) for x in (tokens.key, tokens.query, tokens.target, tokens.delta) if x is not None]
    if rule.layer_norm:
        dtype = tokens.key.dtype
        arguments += [params[name].to(dtype).repeat(batch, 1)[:, None] for name in ("norm_weight", "norm_bias")]
    for gates in tokens.gates:
        arguments += [flat(g.squeeze(-1)) for g in (gates.log_keep, gates.momentum, gates.lr) if g is not None]
        if gates.lr is None:
            arguments.append(flat(torch.ones_like(tokens.key[..., 0])))
    arguments += [flat(x) for x in (*state.weights, *state.momentum, *(state.anchor or state.weights))]
    reads, *after = _FusedScan.apply(plan, *arguments)

    def unflat(x: Tensor) -> Tensor:
        return x.unflatten(0, (batch, heads))

    depth = rule.depth
    weights = tuple(unflat(x) for x in after[:depth])
    momentum = tuple(unflat(x) for x in after[depth : depth + len(state.momentum)])
    anchor = () if rule.exact else state.anchor
    if plan.leaves_anchor:
        anchor = tuple(unflat(x) for x in after[-depth:])
    elif tiles[-1].ends and not rule.exact:
        anchor = weights
    return unflat(reads), replace_state(state, weights=weights, momentum=momentum, anchor=anchor)


@dataclass
class _Arguments:
    """The Function's flat tensors by name; the same class carries their gradients."""

    key: Any
    query: Any
    target: Any
    delta: Any
    norm_weight: Any
    norm_bias: Any
    gates: list[tuple[Any, Any, Any]]
    weights: list[Any]
    momenta: list[Any]
    anchor: list[Any]

    @classmethod
    def unpack(cls, plan: Plan, flat: Sequence[Any]) -> _Arguments:
        items = iter(flat)
        key, query, target = next(items), next(items), next(items)
        delta = next(items) if plan.has_delta else None
        norm = (next(items), next(items)) if plan.has_norm else (None, None)
        momentum = plan.rule.momentum
        gates = []
        for has_keep in plan.has_keep:
            log_keep = next(items) if has_keep else None
            gates.append((log_keep, next(items) if momentum else None, next(items)))
        weights = [next(items) for _ in range(plan.depth)]
        momenta = [next(items) for _ in range(plan.depth if momentum else 0)]
        return cls(key, query, target, delta, *norm, gates, weights, momenta, list(items))

    def pack(self) -> tuple[Any, ...]:
        head = [self.key, self.query, self.target]
        head += [x for x in (self.delta, self.norm_weight, self.norm_bias) if x is not None]
        gates = [x for gate in self.gates for x in gate if x is not None]
        return (*head, *gates, *self.weights, *self.momenta, *self.anchor)

    def affine(self) -> Affine | None:
        return None if self.norm_weight is None else Affine(self.norm_weight, self.norm_bias)

    def tokens(self, tile: Tile) -> TileTokens:
        cut = slice(tile.start, tile.stop)
        delta = None if self.delta is None else self.delta[:, cut]
        return TileTokens(self.key[:, cut], self.query[:, cut], self.target[:, cut], delta)


@dataclass
class _Run:
    """Neighbouring tiles of one length in a span, and the scalars of each matrix for all of them."""

    tiles: list[Tile]
    scalars: list[Scalars]


def _runs(arguments: _Arguments, span: Sequence[Tile]) -> list[_Run]:
    runs = []
    for size, group in itertools.groupby(span, key=lambda tile: tile.stop - tile.start):
        tiles = list(group)
        cut = slice(tiles[0].start, tiles[-1].stop)

        def fold(gate: Tensor | None, cut: slice = cut, size: int = size) -> Tensor | None:
            return None if gate is None else gate[:, cut].unflatten(1, (-1, size))

        scalars = []
        for i, (log_keep, momentum, lr) in enumerate(arguments.gates):
            twin = next((j for j in range(i) if _same(arguments.gates[j], arguments.gates[i])), None)
            rate = fold(lr)
            assert rate is not None
            scalars.append(tile_scalars(fold(log_keep), fold(momentum), rate) if twin is None else scalars[twin])
        runs.append(_Run(tiles, scalars))
    return runs


def _same(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    """Whether two matrices share their gates, so that their scalars are computed once."""
    pairs = zip(left, right, strict=True)
    return all(a is b or (a is not None and b is not None and a.data_ptr() == b.data_ptr()) for a, b in pairs)


@dataclass
class _State:
    """Lists of matrices [n, out, in]: running W and S, and the chunk's first W."""

    weights: list[Tensor]
    momenta: list[Tensor]
    anchor: list[Tensor]


def _advance(state: _State, scalars: list[TileScalars], anchor: Anchor) -> _State:
    weights, momenta = [], []
    for i, weight in enumerate(state.weights):
        momentum = state.momenta[i] if state.momenta else None
        weight, momentum = update_forward(weight, momentum, scalars[i], anchor.errors[i], anchor.inputs[i])
        weights.append(weight)
        momenta += [] if momentum is None else [momentum]
    return _State(weights, momenta, state.anchor)


class _FusedScan(torch.autograd.Function):
    """(plan, flat arguments) -> reads [n, T, D], W and S after the last token, and the open chunk's anchor."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *flat: Tensor) -> tuple[Tensor, ...]:
        arguments = _Arguments.unpack(plan, flat)
        state = _State(arguments.weights, arguments.momenta, arguments.anchor)
        reads = torch.empty_like(arguments.target)
        kept: list[_State] = []
        for span in plan.spans:
            kept.append(state)
            for run in _runs(arguments, span):
                for j, tile in enumerate(run.tiles):
                    state = _walk_forward(plan.rule, arguments, state, tile, [s.tile(j) for s in run.scalars], reads)
        ctx.plan, ctx.kept = plan, kept[1:]
        ctx.save_for_backward(*flat)
        # cloned: the anchor is also a kept state, and an output that the node itself holds would be a cycle
        anchor = [x.clone() for x in state.anchor] if plan.leaves_anchor else []
        outputs = [*state.weights, *state.momenta, *anchor]
        return (reads, *outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        plan, flat = ctx.plan, ctx.saved_tensors
        arguments = _Arguments.unpack(plan, flat)
        first = _State(arguments.weights, arguments.momenta, arguments.anchor)
        kept = [first, *ctx.kept]
        backward = _Backward(plan, arguments, grads)
        for span in reversed(plan.spans):
            backward.span(span, kept.pop())
        return (None, *backward.result().pack())


def _walk_forward(
    rule: Rule, arguments: _Arguments, state: _State, tile: Tile, scalars: list[TileScalars], reads: Tensor
) -> _State:
    if tile.opens:
        state = _State(state.weights, state.momenta, state.weights)
    tokens, affine = arguments.tokens(tile), arguments.affine()
    anchor = anchor_forward(rule, state.anchor, affine, tokens)
    read, _ = read_forward(state.weights, state.momenta, scalars, anchor, affine, tokens.query)
    reads[:, tile.start : tile.stop] = read
    return _advance(state, scalars, anchor)


class _Backward:
    """The reverse walk: gradients of the running state go from tile to tile, all others are gathered."""

    def __init__(self, plan: Plan, arguments: _Arguments, grads: Sequence[Any]) -> None:
        self.plan, self.arguments, self.affine = plan, arguments, arguments.affine()
        depth, self.dreads = plan.depth, grads[0]

        def owned(grad: Any, like: Tensor) -> Tensor:
            return torch.zeros_like(like) if grad is None else grad.clone()

        self.dweights = [owned(g, w) for g, w in zip(grads[1 : 1 + depth], arguments.weights, strict=True)]
        momenta = grads[1 + depth : 1 + depth + len(arguments.momenta)]
        self.dmomenta = [owned(g, w) for g, w in zip(momenta, arguments.momenta, strict=True)]
        last = grads[-depth:] if plan.leaves_anchor else [None] * depth
        self.danchor = [owned(g, w) for g, w in zip(last, arguments.weights, strict=True)]
        self.gathered = _Arguments.unpack(plan, [torch.zeros_like(x) for x in arguments.pack()])

    def span(self, span: Sequence[Tile], state: _State) -> None:
        """Recompute the span's states and inner gradients, then take its tiles in reverse."""
        steps, runs = [], _runs(self.arguments, span)
        for run in runs:
            for j, tile in enumerate(run.tiles):
                if tile.opens:
                    state = _State(state.weights, state.momenta, state.weights)
                scalars = [s.tile(j) for s in run.scalars]
                anchor = anchor_forward(self.plan.rule, state.anchor, self.affine, self.arguments.tokens(tile))
                steps.append((tile, state, scalars, anchor))
                state = _advance(state, scalars, anchor)
        for run in reversed(runs):
            found: list[list[TileScalars]] = [self.tile(*steps.pop()) for _ in run.tiles]
            self._gates(run, found[::-1])

    def tile(self, tile: Tile, state: _State, scalars: list[TileScalars], anchor: Anchor) -> list[TileScalars]:
        """R, U and A of one tile; returns the gradients of its scalars."""
        cut, tokens = slice(tile.start, tile.stop), self.arguments.tokens(tile)
        _, read = read_forward(state.weights, state.momenta, scalars, anchor, self.affine, tokens.query)
        dread = self.dreads[:, cut]
        grads = read_backward(dread, state.weights, state.momenta, scalars, anchor, self.affine, read)
        for i, weight in enumerate(state.weights):
            momentum, dmomentum = (state.momenta[i], self.dmomenta[i]) if state.momenta else (None, None)
            update_backward(i, self.dweights[i], dmomentum, weight, momentum, scalars[i], anchor, grads)
        out = anchor_backward(self.plan.rule, state.anchor, self.affine, tokens, anchor, grads)
        self.dweights = grads.weights
        self.dmomenta = [m for m in grads.momenta if m is not None]
        to = self.gathered
        to.query[:, cut], to.key[:, cut], to.target[:, cut] = grads.query, out.key, out.target
        if to.delta is not None and out.delta is not None:
            to.delta[:, cut] = out.delta
        if to.norm_weight is not None:
            to.norm_weight += grads.norm_weight
            to.norm_bias += grads.norm_bias
        self._anchor(tile, out.weights)
        return grads.scalars

    def _anchor(self, tile: Tile, dweights: list[Tensor]) -> None:
        """The anchor's gradient gathers over a chunk's tiles and joins W's where the chunk opens."""
        for total, one in zip(self.danchor, dweights, strict=True):
            total += one
        if tile.opens:
            for weight, total in zip(self.dweights, self.danchor, strict=True):
                weight += total
                total.zero_()

    def _gates(self, run: _Run, found: list[list[TileScalars]]) -> None:
        cut = slice(run.tiles[0].start, run.tiles[-1].stop)
        for i, gates in enumerate(self.gathered.gates):
            grads = scalars_backward(run.scalars[i], [one[i] for one in found])
            for to, grad in zip(gates, grads, strict=True):
                if to is not None and grad is not None:
                    to[:, cut] = grad.flatten(1)

    def result(self) -> _Arguments:
        """All gradients, in the arguments' order."""
        self.gathered.weights, self.gathered.momenta = self.dweights, self.dmomenta
        self.gathered.anchor = self.danchor
        return self.gathered
