"""Piece-major order: each piece goes through the whole stack before the next, and is computed again in backward.

What is kept of a piece is its input and what it received, so memory does not grow with the sequence but for that.
Gradients are exact: nothing is detached. In backward the pieces run in reverse, each once more with gradients on; a
chain of `order` tensors through them forces that, whatever the engine would like. Parameters get their gradient once,
when the first piece is done, as hooks on them expect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from miras_megatron.layers.documents import CuSeqlens

from .carry_relay import Passage
from .cut import Cut, documents_of_piece
from .exchange import StateRing
from .tape import Place, Tape

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
    """

    ring: StateRing
    per_rank: int = 1
    head_groups: int = 1
    keep_last: bool = True
    kept_in: Place = "device"
    calls: int = 0

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
        self.calls += 1
        for piece in cut.mine(self.ring.index):
            inside, before = documents_of_piece(cu_seqlens, rows, cut.bounds[piece], cut.bounds[piece + 1])
            yield Passage(self.ring, self.calls, piece, cut.pieces, before, self.head_groups), inside

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
        sums = GradientSums(parameters)
        order: Tensor = gate(sums, *parameters)
        outputs: list[Tensor] = []
        roots: list[Tensor] = []
        for number, (x, (passage, documents)) in enumerate(zip(hidden, passages, strict=True)):
            if self.keep_last and number == len(passages) - 1:
                passage.order = order
                outputs.append(stage(number, x, passage, documents))
                roots = passage.roots
                continue
            passage.tape = Tape(self.kept_in)
            again = _Again(partial(_one_piece, stage, number, documents), passage, sums)
            out, order = replay(order, x, again)
            outputs.append(out)
        joined: Tensor = join(dim, len(outputs), *outputs, order, *roots)
        return joined


def _one_piece(stage: Stage, number: int, documents: CuSeqlens, hidden: Tensor | None, passage: Passage) -> Tensor:
    return stage(number, hidden, passage, documents)


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
class _Again:
    """How a piece is computed: once without gradients, and once more with them."""

    stage: Callable[[Tensor | None, Passage], Tensor]
    passage: Passage
    sums: GradientSums


class Replayed(torch.autograd.Function):
    """One piece. forward: run it without a graph, keeping what it receives; backward: run it again, silently."""

    @staticmethod
    def forward(ctx: Any, order: Tensor, hidden: Tensor | None, again: _Again) -> tuple[Tensor, Tensor]:
        ctx.again = again
        ctx.save_for_backward(hidden)
        return again.stage(hidden, again.passage), order.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        again: _Again = ctx.again
        (hidden,) = ctx.saved_tensors
        leaf = None if hidden is None else hidden.detach().requires_grad_()
        with torch.enable_grad(), _replaying(again.passage) as order:
            out = again.stage(leaf, again.passage)
            ends = [out, *again.passage.roots]
        sources = [order, *([] if leaf is None else [leaf]), *again.sums.parameters]
        seeds = [gradients[0], *(torch.zeros_like(x) for x in ends[1:])]
        found = list(torch.autograd.grad(ends, sources, seeds, allow_unused=True)[1:])
        again.passage.tape, again.passage.roots = None, []
        d_hidden = None if leaf is None else found.pop(0)
        again.sums.add(found)
        return gradients[1], d_hidden, None


@contextmanager
def _replaying(passage: Passage) -> Iterator[Tensor]:
    """The passage answers from its tape and is silent; yields the `order` that its receives hang on."""
    passage.order = torch.zeros((), requires_grad=True)
    passage.replaying = True
    yield passage.order


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
