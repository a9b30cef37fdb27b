"""What a span of the hand-written scan's tiles works on: its tokens, heads first, and its gates' products.

Nothing here depends on the state, so it is computed for all tiles of a span at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from .fused_plan import Arguments, Plan, Tile, same_gates
from .fused_scalars import Scalars, TileScalars, tile_scalars
from .fused_tile import TileTokens


@dataclass
class Step:
    """One tile of a run: its tokens and each matrix's scalars."""

    tile: Tile
    tokens: TileTokens
    scalars: list[TileScalars]


@dataclass
class Run:
    """Neighbouring tiles of one length in a span; scalars per matrix for all of them."""

    scalars: list[Scalars]
    steps: list[Step]
    cut: slice


def span_runs(plan: Plan, arguments: Arguments, span: Sequence[Tile]) -> list[Run]:
    """The runs of a span, in order."""
    runs = []
    for size, tiles, cut in tile_lengths(span):
        scalars = _run_scalars(arguments, cut, size)
        by_matrix = [one.tiles() for one in scalars]
        tokens = _run_tokens(plan, arguments, cut, size)
        steps = [Step(tile, tokens[j], [one[j] for one in by_matrix]) for j, tile in enumerate(tiles)]
        runs.append(Run(scalars, steps, cut))
    return runs


def tile_lengths(span: Sequence[Tile]) -> Iterator[tuple[int, list[Tile], slice]]:
    """Neighbouring tiles of one length: (length, tiles, their tokens)."""
    for size, group in itertools.groupby(span, key=lambda tile: tile.stop - tile.start):
        tiles = list(group)
        yield size, tiles, slice(tiles[0].start, tiles[-1].stop)


def _fold(x: Tensor | None, cut: slice, size: int) -> Tensor | None:
    """[B, T, N, ...] -> tiles of the cut, heads first, [n, J, size, ...]."""
    return None if x is None else heads_first(x[:, cut]).unflatten(1, (-1, size))


def heads_first(x: Tensor) -> Tensor:
    """[B, T, N, ...] -> [n, T, ...], a copy where there are several heads or rows."""
    return x.transpose(1, 2).flatten(0, 1)


def heads_last(x: Tensor, like: Tensor) -> Tensor:
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
