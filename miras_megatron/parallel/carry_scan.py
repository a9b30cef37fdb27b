"""The scan: slices of an affine memory compose, so every rank works out by itself the state that comes to it.

    forward   rank r: summary of its slice  --->  all ranks          | those to its left, composed | scan
    backward  rank r: gradients of the summaries to its left  --->  each to its own rank

Nobody waits for a state, only for summaries, which all ranks make at once. Convolutions and windows take the rows
they need from the left neighbour.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from miras_megatron.layers.carry import ALL_HEADS, Scan
from miras_megatron.layers.documents import Documents
from miras_megatron.layers.memory_core import HeadScan
from miras_megatron.memory.affine import SummaryForm, arriving_state, compose_slices, summarise_slice
from miras_megatron.memory.rules import Rule
from miras_megatron.memory.state import MemoryInputs, MemoryState

from .carry_relay import restart
from .carry_slices import SliceCarry
from .cut import documents_of_piece


class ScanCarry(SliceCarry):
    """A `StateCarry` for affine memories whose slices are contiguous, one a rank."""

    def run(
        self, scan: Scan, inputs: Any, state: Any, documents: Documents | None = None, heads: int = 1
    ) -> tuple[Tensor, Any]:
        """Summarise, share, compose, scan.

        Raises ValueError where the block's scan is more than a memory's, or the rule is not affine.
        """
        if not isinstance(scan, HeadScan):
            raise ValueError(
                "carry 'scan' takes memories alone, no MAC (letter c) and no write_persistent: use 'relay'"
            )
        core, before = scan.core, self.before or [0] * len(state.phase)
        spec, context = core.spec, self._window(core.spec.rule, inputs, documents)
        arriving = arriving_state(spec.rule, core.params(), state, before, context, spec.chunk_size)
        form = SummaryForm.of(spec.rule, inputs, self._inside_chunks(before, spec.chunk_size))
        if self.passes_on:
            last = [0] * len(before) if documents is None else [row[-1] for row in documents.starts]
            sizes = spec.chunk_size, spec.checkpoint_every
            own = summarise_slice(form, spec.rule, core.params(), inputs, state, arriving, before, last, *sizes)
        else:
            # To the right of the last slice there is nobody.
            like = state.weights[0]
            own = like.new_zeros(*like.shape[:2], len(form.blocks), form.rows, like.shape[-1])
        left = self._share(own)
        return scan(inputs, _start(form, left, state, arriving, before), documents, ALL_HEADS)

    def _window(self, rule: Rule, inputs: MemoryInputs, documents: Documents | None) -> tuple[Tensor, Tensor] | None:
        """Keys and values of the tokens that a windowed rule writes once more here."""
        if rule.window == 1:
            return None
        rows = self.left_contexts({"k": inputs.k, "v": inputs.v}, rule.window - 1, {}, documents)
        return rows["k"], rows["v"]

    def _inside_chunks(self, before: list[int], chunk_size: int) -> bool:
        """Whether any slice of the row begins inside a chunk, on whatever rank: summaries have one form on all."""
        cut, documents = self.passage.cut, self.passage.documents
        assert cut is not None
        if documents is None:
            return any(bound % chunk_size for bound in cut.bounds[1:-1])
        inner = cut.bounds[1:-1]
        return any(
            past % chunk_size for bound in inner for past in documents_of_piece(documents, len(before), bound, bound)[1]
        )

    def _share(self, own: Tensor) -> list[Tensor]:
        """The summaries of the slices to the left."""
        passage = self.passage
        assert passage.tape is None, "a replay would share summaries again"
        if passage.pieces == 1:
            return []
        if not torch.is_grad_enabled():
            return list(_gather(own, passage.group)[: passage.piece].unbind())
        apply: Any = ShareSummaries.apply
        order = torch.zeros((), requires_grad=True) if passage.order is None else passage.order
        root, left = apply(order, own, passage.piece, passage.group)
        passage.roots.append(root)
        return list(left.unbind())


def _start(
    form: SummaryForm, left: list[Tensor], state: MemoryState, arriving: MemoryState, before: list[int]
) -> MemoryState:
    """The state before the slice: what the slices to the left make of theirs, `state` in rows that begin a document."""
    if not left:
        return state
    blocks = {name: (matrix,) for name, matrix in compose_slices(form, left).items()}
    anchor = blocks.get("anchor", blocks["weights"]) if state.anchor else ()
    came = replace(arriving, weights=blocks["weights"], momentum=blocks.get("momentum", ()), anchor=anchor)
    chosen: MemoryState = restart(came, state, before)
    return chosen


class ShareSummaries(torch.autograd.Function):
    """forward: rank r's summary to all                          rank r  --->  all; kept: those of ranks < r
    backward: their gradients to where they were made, summed    rank r  --->  each rank < r"""

    @staticmethod
    def forward(ctx: Any, order: Tensor, own: Tensor, rank: int, group: Any) -> tuple[Tensor, Tensor]:
        ctx.rank, ctx.group, ctx.like = rank, group, own.new_zeros(()).expand(own.shape)
        return torch.zeros_like(order), _gather(own, group)[:rank].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rank, ranks, count = ctx.rank, dist.get_world_size(ctx.group), ctx.like.numel()
        # One to each rank on the left, one from each on the right.
        to = [count if other < rank else 0 for other in range(ranks)]
        come = [count if other > rank else 0 for other in range(ranks)]
        received = ctx.like.new_empty(ranks - rank - 1, *ctx.like.shape)
        dist.all_to_all_single(received.flatten(), gradients[1].contiguous().flatten(), come, to, group=ctx.group)
        return None, received.sum(0), None, None


def _gather(own: Tensor, group: Any) -> Tensor:
    """[ranks, *own.shape]."""
    parts = own.new_empty(dist.get_world_size(group), *own.shape)
    dist.all_gather(list(parts.unbind()), own.detach().contiguous(), group=group)
    return parts
