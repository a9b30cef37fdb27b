"""Packed documents as lanes: every document is a row of its own, so its state and chunk grid start afresh.

A *lane* is one document of one batch row; the first of a row goes on from the given state. Lanes of one phase
run side by side as one batch, longest first; where the shortest end, they drop out and the others go on, which
a complete state allows at any token. Nothing is padded.
"""

from __future__ import annotations

import reprlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .state import MemoryInputs, MemoryState, join_rows

UniformScan = Callable[[MemoryInputs, MemoryState], tuple[Tensor, MemoryState]]
"""Scans rows that all stand at the same phase: (inputs [B', n, ...], state) -> (reads [B', n, N, D], state)."""


@dataclass
class Lane:
    """Tokens start..stop-1 of batch row `row`; `phase` tokens of its chunk are done; `last` of its row."""

    row: int
    start: int
    stop: int
    phase: int
    last: bool

    @property
    def left(self) -> int:
        return self.stop - self.start


def document_cuts(cu_seqlens: Tensor | Sequence[Tensor] | None, batch: int, length: int) -> list[list[int]]:
    """The borders of each row's documents, 0 .. T; empty documents are dropped.

    Raises ValueError where borders do not rise from 0 to T or the list is not one entry a row.
    """
    if cu_seqlens is None:
        return [[0, length]] * batch
    rows = border_rows(cu_seqlens, batch)
    if len(rows) != batch:
        raise ValueError(
            f"cu_seqlens: {len(rows)} entries for a batch of {batch}; give one tensor a row, or one for all"
        )
    cuts = []
    for row, borders in enumerate(rows):
        cut = read_borders(row, borders)
        if len(cut) < 2 or cut[0] != 0 or cut[-1] != length or any(a > b for a, b in zip(cut, cut[1:], strict=False)):
            raise ValueError(f"cu_seqlens of row {row} = {cut}: must rise from 0 to the number of tokens, {length}")
        cuts.append([a for a, b in zip(cut, cut[1:], strict=False) if a < b] + [length])
    return cuts


def border_rows(cu_seqlens: Any, batch: int) -> list[Any]:
    """The borders of each row as they were given. Raises ValueError where they are neither a tensor nor a list."""
    if isinstance(cu_seqlens, Tensor):
        return [cu_seqlens] * batch
    if not isinstance(cu_seqlens, (list, tuple)):
        raise ValueError(f"cu_seqlens = {cu_seqlens!r}: must be one tensor, or a list with one a row")
    return list(cu_seqlens)


def read_borders(row: int, borders: Any) -> list[int]:
    """One row's borders as numbers. Raises ValueError where they aren't whole numbers in one dimension."""
    if isinstance(borders, (list, tuple)) and all(type(x) is int for x in borders):
        return list(borders)
    if not isinstance(borders, Tensor):
        raise ValueError(f"cu_seqlens of row {row} = {reprlib.repr(borders)}: must be a tensor of whole numbers")
    whole = borders.dtype in (torch.int64, torch.int32) or not borders.numel()  # torch.tensor([]) is float
    if borders.ndim != 1 or not whole:
        is_now = f"{borders.dtype} {tuple(borders.shape)}"
        raise ValueError(f"cu_seqlens of row {row} is {is_now}: must be int64 with one dimension")
    return [int(x) for x in borders.tolist()]


def scan_lanes(
    scan: UniformScan,
    inputs: MemoryInputs,
    state: MemoryState,
    fresh: Callable[[int], MemoryState],
    cuts: list[list[int]],
) -> tuple[Tensor, MemoryState]:
    """Scan every document of every row; returns reads [B, T, N, D] and the state after each row's last token.

    `fresh(n)` makes the states of n new documents.
    """
    batch, length = inputs.q.shape[:2]
    flat = inputs.map(lambda x: x.reshape(batch * length, *x.shape[2:]))
    pieces: list[Tensor] = []
    places: list[Tensor] = []
    ends: dict[int, tuple[MemoryState, int]] = {}
    for group in _groups(cuts, state):
        current = _start_states(group, state, fresh)
        for done, size, count in _stretches(group):
            running = group[:count]
            starts = torch.tensor([lane.row * length + lane.start + done for lane in running])
            index = (starts[:, None] + torch.arange(size)).to(inputs.q.device)
            current = current.map(partial(_first, count=count))
            reads, current = scan(flat.map(partial(_picked, index=index)), current)
            pieces.append(reads.flatten(0, 1))
            places.append(index.flatten())
            ends |= {lane.row: (current, i) for i, lane in enumerate(running) if lane.last and done + size == lane.left}
    order = torch.argsort(torch.cat(places))
    reads = torch.cat(pieces).index_select(0, order).unflatten(0, (batch, length))
    return reads, join_rows([ends[row][0].rows(torch.tensor([ends[row][1]])) for row in range(batch)])


def _first(x: Tensor, count: int) -> Tensor:
    return x[:count]


def _picked(x: Tensor, index: Tensor) -> Tensor:
    return x[index]


def _groups(cuts: list[list[int]], state: MemoryState) -> list[list[Lane]]:
    """Lanes that start at the same phase, the longest first."""
    groups: dict[int, list[Lane]] = defaultdict(list)
    for row, borders in enumerate(cuts):
        for i, (start, stop) in enumerate(zip(borders, borders[1:], strict=False)):
            phase = int(state.phase[row]) if i == 0 else 0
            groups[phase].append(Lane(row, start, stop, phase, stop == borders[-1]))
    return [sorted(lanes, key=lambda lane: -lane.left) for lanes in groups.values()]


def _start_states(group: list[Lane], state: MemoryState, fresh: Callable[[int], MemoryState]) -> MemoryState:
    """The lanes' first states in their order: given ones for lanes at token 0, fresh ones for the others."""
    given = [lane.row for lane in group if lane.start == 0]
    parts = [state.rows(torch.tensor(given, dtype=torch.int64))] if given else []
    if len(given) < len(group):
        parts.append(fresh(len(group) - len(given)))
    firsts = iter(range(len(given)))
    others = iter(range(len(given), len(group)))
    order = [next(firsts) if lane.start == 0 else next(others) for lane in group]
    return join_rows(parts).rows(torch.tensor(order))


def _stretches(group: list[Lane]) -> Iterator[tuple[int, int, int]]:
    """(tokens done, tokens to take, how many lanes take part): up to the end of the shortest lane still running."""
    done = 0
    while group and done < group[0].left:
        count = sum(lane.left > done for lane in group)
        shortest = group[count - 1].left
        yield done, shortest - done, count
        done = shortest
