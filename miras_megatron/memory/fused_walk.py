"""The walk of the hand-written scan over its tiles: one autograd Function, states kept every span.

Forward keeps the state only at the start of each span (that of the first is an argument); backward walks the spans in
reverse, recomputes a span's states and inner gradients, and then its tiles in reverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .fused_backward import AnchorGrads, TileGrads, anchor_backward, read_backward, update_backward
from .fused_plan import Arguments, Plan, ReverseWalk, Tile
from .fused_runs import Run, Step, heads_first, heads_last, span_runs
from .fused_scalars import TileScalars, scalars_backward
from .fused_tile import Anchor, anchor_forward, read_forward, refresh, update_forward
from .fused_workspace import Workspace


@dataclass
class State:
    """Per matrix: the running [W; S] as [n, r, out, in], and the chunk's first W [n, out, in]."""

    stacks: list[Tensor]
    anchor: list[Tensor]

    @classmethod
    def first(cls, arguments: Arguments) -> State:
        return cls(arguments.stacks(), arguments.anchor)

    def at(self, tile: Tile) -> State:
        """The state with which a tile is walked: where a chunk opens, its anchor is the running W."""
        if not tile.opens:
            return self
        anchor = [stack[:, 0] for stack in self.stacks]
        # the walk writes over the stacks of tiles that it has left
        return State(self.stacks, anchor if tile.ends else [x.clone() for x in anchor])

    def after(self, scalars: list[TileScalars], anchor: Anchor, kept: Workspace, scratch: Workspace) -> State:
        parts = enumerate(zip(self.stacks, scalars, strict=True))
        return State([update_forward(i, *one, anchor, kept, scratch) for i, one in parts], self.anchor)


class FusedScan(torch.autograd.Function):
    """(plan, flat arguments) -> reads [B, T, N, D], W and S after the last token, and the open chunk's anchor."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *flat: Tensor) -> tuple[Tensor, ...]:
        ctx.plan, arguments = plan, Arguments.unpack(plan, flat)
        ctx.save_for_backward(*flat)
        reads = torch.empty_like(arguments.value, memory_format=torch.contiguous_format)
        if plan.replays:
            return (reads, *arguments.blank_states(plan))
        state, affine = State.first(arguments), arguments.affine()
        kept = [stack.new_empty(len(plan.spans) - 1, *stack.shape) for stack in state.stacks]
        scratch, turns = Workspace(reads), (Workspace(reads), Workspace(reads))
        for j, span in enumerate(plan.spans):
            for block, stack in zip(kept, state.stacks if j else [], strict=bool(j)):
                block[j - 1] = stack
            for step in (step for run in span_runs(plan, arguments, span) for step in run.steps):
                state, turns = state.at(step.tile), turns[::-1]
                anchor = anchor_forward(plan.rule, state.anchor, affine, step.tokens, scratch, scratch)
                read, _ = read_forward(state.stacks, step.scalars, anchor, affine, step.tokens.query, scratch)
                read = read + step.tokens.query if plan.folds_residual else read
                reads[:, step.tile.start : step.tile.stop] = heads_last(read, reads)
                state = state.after(step.scalars, anchor, turns[0], scratch)
        ctx.kept = kept
        rows = [stack[:, r].clone() for r in range(1 + bool(arguments.momenta)) for stack in state.stacks]
        anchors = [x.clone() for x in state.anchor] if plan.leaves_anchor else []
        return (reads, *rows, *anchors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        plan, arguments = ctx.plan, Arguments.unpack(ctx.plan, ctx.saved_tensors)
        backward = _Backward(plan, arguments, grads)
        for j in range(len(plan.spans) - 1, 0, -1):
            backward.span(plan.spans[j], State([block[j - 1] for block in ctx.kept], arguments.anchor))
        backward.span(plan.spans[0], State.first(arguments))
        return (None, *backward.result().pack())


class _Backward(ReverseWalk):
    """The reverse walk: gradients of the running state go from tile to tile, all others are gathered."""

    def __init__(self, plan: Plan, arguments: Arguments, grads: Sequence[Tensor]) -> None:
        super().__init__(plan, arguments, grads)
        self.affine = arguments.affine()
        self.spare = [torch.empty_like(stack) for stack in self.dstacks]
        like = arguments.key
        self.scratch, self.slots = Workspace(like), [Workspace(like) for _ in max(plan.spans, key=len)]

    def span(self, span: Sequence[Tile], state: State) -> None:
        """Recompute the span's states and inner gradients, then take its tiles in reverse."""
        runs, known = span_runs(self.plan, self.arguments, span), []
        steps = [step for run in runs for step in run.steps]
        for step, slot in zip(steps, self.slots, strict=False):
            state = state.at(step.tile)
            anchor = anchor_forward(self.plan.rule, state.anchor, self.affine, step.tokens, slot, self.scratch)
            known.append((state, anchor))
            if step is not steps[-1]:
                state = state.after(step.scalars, anchor, slot, self.scratch)
        for run in reversed(runs):
            found = [one.blank() for one in run.scalars]
            by_matrix = [one.tiles() for one in found]
            for j in range(len(run.steps) - 1, -1, -1):
                self.tile(run.steps[j], *known.pop(), [one[j] for one in by_matrix])
            self._gates(run, found)

    def tile(self, step: Step, state: State, anchor: Anchor, dscalars: list[TileScalars]) -> None:
        """R, U and A of one tile; writes the gradients of its scalars."""
        cut, stacks, scalars, scratch = slice(step.tile.start, step.tile.stop), state.stacks, step.scalars, self.scratch
        slopes, dread = refresh(anchor, scratch), heads_first(self.dreads[:, cut])
        grads = TileGrads([], [], self.spare, dscalars, dread)
        for i, stack in enumerate(stacks):
            update_backward(i, self.dstacks[i], stack, scalars[i], anchor, grads, scratch)
        _, read = read_forward(stacks, scalars, anchor, self.affine, step.tokens.query, scratch)
        read_backward(dread, stacks, scalars, anchor, self.affine, read, grads, scratch)
        rule, affine = self.plan.rule, self.affine
        alone = step.tile.opens and step.tile.ends
        dweights = [stack[:, 0] for stack in self.spare] if alone else self.danchor
        out = anchor_backward(rule, state.anchor, affine, step.tokens, anchor, slopes, grads, dweights, scratch)
        self.dstacks, self.spare = self.spare, self.dstacks
        self._tokens(cut, dread, grads.query, out)
        to = self.gathered
        if to.norm_weight is not None:
            to.norm_weight += grads.norm_weight
            to.norm_bias += grads.norm_bias
        if step.tile.opens and not alone:
            self._join_anchor()

    def _tokens(self, cut: slice, dread: Tensor, dquery: Tensor, out: AnchorGrads) -> None:
        """The tile's token gradients, with the residual's share: y = net(q) + q, target = v - k."""
        to, dkey = self.gathered, out.key
        if self.plan.folds_residual:
            dquery = dquery + dread
            dkey = dkey if self.plan.rule.objective == "dot" else dkey - out.target
        pairs = ((to.query, dquery), (to.key, dkey), (to.value, out.target), (to.delta, out.delta))
        for total, one in pairs:
            if total is not None and one is not None:
                total[:, cut] = heads_last(one, total)

    def _join_anchor(self) -> None:
        """The anchor's gradient, gathered over a chunk's tiles, joins W's where the chunk opens."""
        for stack, total in zip(self.dstacks, self.danchor, strict=True):
            stack[:, 0] += total
            total.zero_()

    def _gates(self, run: Run, found: list[TileScalars]) -> None:
        for i, gates in enumerate(self.gathered.gates):
            for to, grad in zip(gates, scalars_backward(run.scalars[i], found[i]), strict=True):
                if to is not None and grad is not None:
                    to[:, run.cut] = heads_last(grad.flatten(1), to)
