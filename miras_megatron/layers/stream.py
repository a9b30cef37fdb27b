"""A memory over a whole stream of layer inputs, and the option that it writes the persistent rows too.

With `write_persistent` the stream is [persistent rows; document] at every document start: the rows go
through the convolution, shift the chunk grid and are written; their reads are dropped (rules 11.12).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..memory import MemoryInputs, MemoryState
from .carry import LOCAL, StateCarry
from .documents import Documents, join_trees, select_rows
from .memory_core import HeadScan, MemoryCore
from .spans import span_tokens, walk_spans

Tree = dict[str, Any]


@dataclass
class Scanned:
    """What a scan read and started from.

    start  None where a carry scanned heads apart
    first  the token at which row 0's last document begins; 0: it goes on from `start`
    """

    inputs: MemoryInputs
    start: MemoryState | None
    first: int


def scan_stream(
    core: MemoryCore, x: Tensor, state: Tree | None, documents: Documents | None, carry: StateCarry = LOCAL
) -> tuple[Tensor, Tree, Scanned]:
    """Reads [B, T, N, D] of x [B, T, d], the state to go on from, and what was scanned."""
    before = state or {}
    inputs, tails = core.inputs(x, before, documents, carry)
    start = before["memory"] if "memory" in before else core.start(x.shape[0])
    scan = HeadScan(core)
    reads, memory = carry.run(scan, inputs, start, documents, core.heads)
    return (
        reads.to(x.dtype),
        tails | {"memory": memory},
        Scanned(inputs, scan.started, documents.starts[0][-1] if documents else 0),
    )


def takes_spans(
    core: MemoryCore, x: Tensor, state: Tree | None, documents: Documents | None, carry: StateCarry
) -> bool:
    """Whether `scan_by_spans` computes this stream, and saves memory: rows that stand at one place of their chunks."""
    phase = None if state is None else state["memory"].phase
    level = phase is None or bool((phase == phase[0]).all())
    whole = documents is None and carry is LOCAL and core.replays and level
    return (
        whole and torch.is_grad_enabled() and x.shape[1] > span_tokens(core.spec.chunk_size, core.spec.checkpoint_every)
    )


def scan_by_spans(core: MemoryCore, x: Tensor, state: Tree | None) -> tuple[Tensor, Tree]:
    """As `scan_stream`, span by span: queries, keys, values and gates aren't kept for backward but computed again."""

    def step(x: Tensor, state: Tree, replays: bool) -> tuple[tuple[Tensor], Tree]:
        inputs, tails = core.inputs(x, state, None)
        start: MemoryState = state["memory"]
        reads, memory = core.replay(inputs, start) if replays else core.scan(inputs, start)
        return (reads.to(x.dtype),), tails | {"memory": memory}

    before = state if state is not None else core.blank(x.shape[0])
    (reads,), after = walk_spans(step, x, before, core.spec.chunk_size, core.spec.checkpoint_every)
    return reads, after


def scan_after_persistent(
    core: MemoryCore,
    x: Tensor,
    persistent: Tensor,
    state: Tree | None,
    documents: Documents | None,
    carry: StateCarry = LOCAL,
) -> tuple[Tensor, Tree, Scanned]:
    """As `scan_stream`, with `persistent` [P, d] written at every document start (token 0 too without `state`).

    Rows move against each other, so what is carried is the whole state.
    """
    begins = [state is None] * x.shape[0] if carry.before is None else [tokens == 0 for tokens in carry.before]

    seen: list[Scanned] = []

    def scan(x: Tensor, state: Tree, documents: Documents | None, heads: slice) -> tuple[Tensor, Tree]:
        reads, after, scanned = _scan_with_rows(core, x, persistent, state, documents, begins)
        seen.append(scanned)
        return reads, after

    reads, after = carry.run(scan, x, state if state is not None else core.blank(x.shape[0]), documents)
    return reads, after, seen[-1]


def _scan_with_rows(
    core: MemoryCore, x: Tensor, persistent: Tensor, state: Tree, documents: Documents | None, begins: list[bool]
) -> tuple[Tensor, Tree, Scanned]:
    """`begins` says of each row whether it starts a document at token 0; its state is blank then.

    What was scanned is that of rows with as many new documents as row 0, which is their first.
    """
    starts = documents.starts if documents is not None else ((0,),) * x.shape[0]
    groups: dict[int, list[int]] = defaultdict(list)
    points = [[s for s in row if s > 0 or new] for row, new in zip(starts, begins, strict=True)]
    for row, at in enumerate(points):
        groups[len(at)].append(row)
    reads, states, order, seen = [], [], [], []
    for rows in groups.values():
        stream, cuts, kept = _insert(x[rows], persistent, [points[r] for r in rows], [starts[r] for r in rows])
        read, after, scanned = scan_stream(core, stream, select_rows(state, rows), cuts)
        reads.append(read.gather(1, kept[..., None, None].expand(-1, -1, *read.shape[2:])))
        states.append(after)
        seen += [scanned] if rows[0] == 0 else []
        order += rows
    back = sorted(range(len(order)), key=order.__getitem__)
    return torch.cat(reads)[back], select_rows(join_trees(states), back), seen[0]


def _insert(
    x: Tensor, rows: Tensor, points: list[list[int]], starts: list[tuple[int, ...]]
) -> tuple[Tensor, Documents | None, Tensor]:
    """x with `rows` before each of its `points`, the new documents, and where x's own tokens are now [B, T]."""
    count, tokens, total = rows.shape[0], x.shape[1], x.shape[1] + rows.shape[0] * len(points[0])
    source, kept, cuts = [], [], []
    for at, begins in zip(points, starts, strict=True):
        shift = torch.zeros(tokens, dtype=torch.int64)
        for point in at:
            shift[point:] += count
        place = torch.arange(tokens) + shift
        whole = torch.full((total,), -1).scatter_(0, place, torch.arange(tokens) + count)
        whole[whole < 0] = torch.arange(count).repeat(len(at))
        source.append(whole)
        kept.append(place)
        cuts.append(torch.tensor([int(place[b]) - (count if b in at else 0) for b in begins] + [total]))
    stream = torch.cat([rows.expand(len(points), -1, -1).to(x.dtype), x], 1)
    index = torch.stack(source).to(x.device)[..., None].expand(-1, -1, x.shape[-1])
    return stream.gather(1, index), Documents.of(cuts, len(points), total), torch.stack(kept).to(x.device)
