"""Piece-major order: each piece goes through the whole stack before the next, and is computed again in backward.

What is kept of a piece is its input and what it received, so memory does not grow with the sequence but for that.
Gradients are exact: nothing is detached. In backward the pieces run in reverse, each once more with gradients on; a
chain of `order` tensors through them forces that, whatever the engine would like. Parameters get their gradient once,
when the first piece is done, as hooks on them expect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from miras_megatron.layers.documents import CuSeqlens

from .carries import CARRIES
from .carry_relay import Passage
from .cut import Cut, documents_of_piece
from .exchange import StateRing
from .tape import Place, Pool, Tape
from .trace import Recorder

Stage = Callable[[int, Tensor | None, Passage, CuSeqlens], Tensor]
"""(number of the piece on this rank, its hidden states or None, its passage, its documents) -> its output."""


@dataclass
class Relay:
    """Takes rows that ranks share through a stage, piece by piece.

    ring         the neighbours
    per_rank     pieces of a rank
    head_groups  see Passage
    keep_last    the rank's last piece keeps its graph, since its backward comes first: not where several
                 micro-batches are under way
    kept_in      where what was received waits for the replay
    every        pieces between two borders at which it is kept; what lies between is received again, from the pieces
                 before, which are on this rank: above 1 only where the ring has one rank
    carry        how states cross, a name of CARRIES; those but the relay take one piece a rank, which keeps its graph
    group        the process group of the ring, for such carries
    """

    ring: StateRing
    per_rank: int = 1
    head_groups: int = 1
    keep_last: bool = True
    kept_in: Place = "device"
    every: int = 1
    carry: str = "relay"
    group: Any = None
    calls: int = 0
    recorder: Recorder = field(default_factory=Recorder)

    def cut(self, tokens: int) -> Cut:
        """Of rows of `tokens` tokens."""
        return Cut.even(tokens, self.per_rank * self.ring.size, self.ring.size)

    def walk(
        self,
        stage: Stage,
        cut: Cut,
        rows: int,
        cu_seqlens: CuSeqlens,
        hidden: Sequence[Tensor | None],
        parameters: Sequence[Tensor],
        dim: int,
    ) -> Tensor:
        """The stage's output for this rank's slice, its pieces joined along `dim`.

        cu_seqlens   documents of the whole rows
        hidden       what the stage before made of each piece here, or None each
        parameters   all that the stage's gradients go to, besides `hidden`
        """
        passages = list(self._passages(cut, rows, cu_seqlens))
        if not torch.is_grad_enabled():
            parts = [stage(i, x, p, c) for i, (x, (p, c)) in enumerate(zip(hidden, passages, strict=True))]
            return torch.cat(parts, dim)
        return self._with_gradients(stage, passages, hidden, [p for p in parameters if p.requires_grad], dim)

    def _passages(self, cut: Cut, rows: int, cu_seqlens: CuSeqlens) -> Iterator[tuple[Passage, CuSeqlens]]:
        assert self.carry == "relay" or self.per_rank == 1, f"carry {self.carry!r} works on whole slices"
        self.calls += 1
        for piece in cut.mine(self.ring.index):
            inside, before = documents_of_piece(cu_seqlens, rows, cut.bounds[piece], cut.bounds[piece + 1])
            passage = Passage(self.ring, self.calls, piece, cut.pieces, before, self.head_groups)
            passage.cut, passage.documents, passage.group = cut, cu_seqlens, self.group
            passage.kind, passage.recorder = CARRIES[self.carry], self.recorder
            yield passage, inside

    def _with_gradients(
        self,
        stage: Stage,
        passages: Sequence[tuple[Passage, CuSeqlens]],
        hidden: Sequence[Tensor | None],
        parameters: Sequence[Tensor],
        dim: int,
    ) -> Tensor:
        gate: Any = GradientGate.apply
        replay: Any = Replayed.apply
        join: Any = Joined.apply
        sums, kept, made = GradientSums(parameters), Pool(), Pool()
        outputs: list[Tensor] = []
        roots: list[Tensor] = []
        runs = [
            PieceRun(partial(stage, number), x, passage, documents)
            for number, (x, (passage, documents)) in enumerate(zip(hidden, passages, strict=True))
        ]
        last = [runs.pop()] if self.keep_last or self.carry != "relay" else []
        # Where no piece is replayed, parameters needn't pass the gate: ZeRO 3 may not have them here.
        order: Tensor = gate(sums, *parameters) if runs else parameters[0].new_zeros((), requires_grad=True)
        for start in range(0, len(runs), self.every):
            group = runs[start : start + self.every]
            group[0].passage.tape = Tape(self.kept_in, kept)
            *parts, order = replay(order, ReplayedRuns(group, sums, made), *(run.hidden for run in group))
            outputs += parts
        for run in last:
            run.passage.order = order
            outputs.append(run(run.hidden))
            roots = run.passage.roots
        joined: Tensor = join(dim, len(outputs), *outputs, order, *roots)
        return joined


class GradientSums:
    """The gradients of a stage's parameters, added up over pieces in float32 (float64 stays as it is)."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self.sums: list[Tensor | None] = [None] * len(self.parameters)

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add one piece's gradients; None where a parameter took no part."""
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            known = self.sums[i]
            if known is None:
                # A copy: what autograd returns may be a view or shared.
                self.sums[i] = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
            else:
                known.add_(gradient)

    def take(self) -> list[Tensor | None]:
        """The sums, which are forgotten here."""
        sums, self.sums = self.sums, [None] * len(self.parameters)
        return [s if s is None else s.to(p.dtype) for s, p in zip(sums, self.parameters, strict=True)]


class GradientGate(torch.autograd.Function):
    """Through it parameters get the gradients of all replayed pieces at once: its backward comes after theirs."""

    @staticmethod
    def forward(ctx: Any, sums: GradientSums, *parameters: Tensor) -> Tensor:
        ctx.sums = sums
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *order: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.sums.take()


@dataclass
class PieceRun:
    """One piece and how it is computed."""

    stage: Callable[[Tensor | None, Passage, CuSeqlens], Tensor]
    hidden: Tensor | None
    passage: Passage
    documents: CuSeqlens

    def __call__(self, hidden: Tensor | None) -> Tensor:
        """The piece's output."""
        what = "replay" if self.passage.silent else "forward"
        with self.passage.recorder.span("piece", f"{what} {self.passage.piece}"):
            return self.stage(hidden, self.passage, self.documents)


@dataclass
class ReplayedRuns:
    """Pieces that follow each other on this rank, of which only the first one's tape is kept, and their gradients.

    made  where the outputs wait until they are joined
    """

    runs: list[PieceRun]
    sums: GradientSums
    made: Pool

    def refill(self, hidden: Sequence[Tensor | None]) -> None:
        """Fill the tapes of all pieces but the first and the last by running all but the last once more."""
        for i, (run, x) in enumerate(zip(self.runs[:-1], hidden, strict=False)):
            run.passage.recalls = i == 0
            run.passage.tape = run.passage.tape or Tape()
            run(x)
            run.passage.recalls = True

    def differentiate(self, index: int, hidden: Tensor | None, gradient: Tensor) -> Tensor | None:
        """One piece with its graph: parameters' gradients are added up, that of `hidden` is returned."""
        run = self.runs[index]
        passage, leaf = run.passage, None if hidden is None else hidden.detach().requires_grad_()
        passage.recalls, passage.silent = index == 0 or passage.recalls, True
        with torch.enable_grad():
            passage.order = torch.zeros((), requires_grad=True)
            ends = [run(leaf), *passage.roots]
        sources = [passage.order, *([] if leaf is None else [leaf]), *self.sums.parameters]
        seeds = [gradient, *(torch.zeros_like(x) for x in ends[1:])]
        with passage.recorder.span("piece", f"backward {passage.piece}"):
            found = list(torch.autograd.grad(ends, sources, seeds, allow_unused=True)[1:])
        passage.tape, passage.roots = None, []
        d_hidden = None if leaf is None else found.pop(0)
        self.sums.add(found)
        return d_hidden


class Replayed(torch.autograd.Function):
    """forward: run pieces without a graph, keeping what the first receives; backward: run them again, silently."""

    @staticmethod
    def forward(ctx: Any, order: Tensor, again: ReplayedRuns, *hidden: Tensor | None) -> tuple[Tensor, ...]:
        ctx.again = again
        ctx.save_for_backward(*hidden)
        return *(again.made.copy(run(x)) for run, x in zip(again.runs, hidden, strict=True)), order.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        again: ReplayedRuns = ctx.again
        hidden = ctx.saved_tensors
        with torch.no_grad():
            again.refill(hidden)
        found: list[Tensor | None] = []
        for index in reversed(range(len(hidden))):
            found.insert(0, again.differentiate(index, hidden[index], gradients[index]))
        return gradients[-1], None, *found


class Joined(torch.autograd.Function):
    """The pieces' outputs as one tensor of its own, with all that must be differentiated along with it."""

    @staticmethod
    def forward(ctx: Any, dim: int, count: int, *tensors: Tensor) -> Tensor:
        ctx.dim, ctx.lengths = dim, [x.shape[dim] for x in tensors[:count]]
        ctx.others = len(tensors) - count
        return torch.cat(tensors[:count], dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        parts = gradients[0].split(ctx.lengths, ctx.dim)
        return None, None, *parts, *(gradients[0].new_zeros(()) for _ in range(ctx.others))
