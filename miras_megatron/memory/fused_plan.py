"""How one call of the hand-written scan is walked: spans of tiles, and its flat arguments by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .fused_tile import Affine
from .rules import Rule

TILE = 64
"""Tokens walked at once; never semantic."""


@dataclass(frozen=True)
class Tile:
    """Tokens start..stop-1; whether the tile opens and whether it ends its chunk."""

    start: int
    stop: int
    opens: bool
    ends: bool


@dataclass(frozen=True)
class Plan:
    """The rule, its spans of tiles, and what the flat arguments hold."""

    rule: Rule
    spans: tuple[tuple[Tile, ...], ...]
    depth: int
    has_delta: bool
    has_norm: bool
    has_keep: tuple[bool, ...]
    leaves_anchor: bool
    folds_residual: bool
    """the read adds q and the target is v - k (v alone under the dot product), tile by tile"""
    replays: bool = False
    """forward only keeps what backward needs and leaves its outputs blank: it has been walked before"""


def plan_tiles(length: int, phase: int, chunk_size: int, every: int) -> tuple[tuple[Tile, ...], ...]:
    """The spans of `length` tokens that begin `phase` tokens inside a chunk."""
    spans: list[tuple[Tile, ...]] = []
    tiles: list[Tile] = []
    start = 0
    while start < length:
        at = (phase + start) % chunk_size
        stop = min(length, start + chunk_size - at, start + TILE)
        tiles.append(Tile(start, stop, at == 0, at + stop - start == chunk_size))
        start = stop
        if tiles[-1].ends and (phase + stop) % (chunk_size * every) == 0:
            spans.append(tuple(tiles))
            tiles = []
    return (*spans, tuple(tiles)) if tiles else tuple(spans)


@dataclass
class Arguments:
    """The Function's tensors by name; the same class carries their gradients.

    key, query [B, T, N, F]; value, delta [B, T, N, D]; gates per matrix (log_keep, momentum, lr) [B, T, N]; and with
    n = B x N: the LN's [n, 1, D]; weights, momenta, anchor per matrix [n, out, in]
    """

    key: Any
    query: Any
    value: Any
    delta: Any
    norm_weight: Any
    norm_bias: Any
    gates: list[tuple[Any, Any, Any]]
    weights: list[Any]
    momenta: list[Any]
    anchor: list[Any]

    @classmethod
    def unpack(cls, plan: Plan, flat: Sequence[Any]) -> Arguments:
        items = iter(flat)
        key, query, value = next(items), next(items), next(items)
        delta = next(items) if plan.has_delta else None
        momentum = plan.rule.momentum
        gates = []
        for has_keep in plan.has_keep:
            log_keep = next(items) if has_keep else None
            gates.append((log_keep, next(items) if momentum else None, next(items)))
        norm_weight, norm_bias = (next(items), next(items)) if plan.has_norm else (None, None)
        weights = [next(items) for _ in range(plan.depth)]
        momenta = [next(items) for _ in range(plan.depth if momentum else 0)]
        return cls(key, query, value, delta, norm_weight, norm_bias, gates, weights, momenta, list(items))

    def pack(self) -> tuple[Any, ...]:
        return (*self.tokens_and_norm(), *self.matrices())

    def tokens_and_norm(self) -> tuple[Any, ...]:
        head = [x for x in (self.key, self.query, self.value, self.delta) if x is not None]
        gates = [x for gate in self.gates for x in gate if x is not None]
        return (*head, *gates, *[x for x in (self.norm_weight, self.norm_bias) if x is not None])

    def matrices(self) -> tuple[Any, ...]:
        return (*self.weights, *self.momenta, *self.anchor)

    def blank_states(self, plan: Plan) -> list[Tensor]:
        """Room for W, S and the open chunk's anchor after the last token."""
        anchors = self.anchor if plan.leaves_anchor else []
        return [torch.empty_like(x) for x in (*self.weights, *self.momenta, *anchors)]

    def blank_gradients(self, plan: Plan) -> Arguments:
        """Room for the tokens' gradients and zeros for all that is summed; matrices None."""
        wanted = self.tokens_and_norm()
        blank = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in wanted[:3]]
        blank += [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in wanted[3:]]
        return Arguments.unpack(plan, [*blank, *[None] * len(self.matrices())])

    def stacks(self) -> list[Tensor]:
        """Per matrix the state before the first token, [W; S] as [n, r, out, in]."""
        rows = zip(self.weights, self.momenta, strict=True) if self.momenta else zip(self.weights)
        return [torch.stack(one, 1) for one in rows]

    def affine(self) -> Affine | None:
        return None if self.norm_weight is None else Affine(self.norm_weight, self.norm_bias)


class ReverseWalk:
    """What a walk in reverse carries from tile to tile, dstacks and danchor, and gathers for the tokens.

    grads: of the reads, W and S after the last token, and the open chunk's anchor where it was given out
    """

    def __init__(self, plan: Plan, arguments: Arguments, grads: Sequence[Tensor]) -> None:
        self.plan, self.arguments, self.dreads = plan, arguments, grads[0]
        depth, given = plan.depth, len(arguments.weights) + len(arguments.momenta)
        rows = grads[1 : 1 + given]
        self.dstacks = [torch.stack(list(rows[i::depth]), 1) for i in range(depth)]
        self.danchor = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in arguments.weights]
        for total, grad in zip(self.danchor, grads[1 + given :], strict=False):
            total += grad
        self.gathered = arguments.blank_gradients(plan)

    def result(self) -> Arguments:
        """All gradients, in the arguments' order."""
        rows = [stack.unbind(1) for stack in self.dstacks]
        self.gathered.weights = [row[0] for row in rows]
        self.gathered.momenta = [row[1] for row in rows] if self.arguments.momenta else []
        self.gathered.anchor = self.danchor
        return self.gathered


def same_gates(left: tuple[Tensor | None, ...], right: tuple[Tensor | None, ...]) -> bool:
    """Whether two matrices share their gates, so that their scalars are computed once."""

    def same(a: Tensor | None, b: Tensor | None) -> bool:
        if a is None or b is None:
            return a is b
        return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()

    return all(same(a, b) for a, b in zip(left, right, strict=True))
