"""The walk of the hand-written scan by a compiled kernel, lane by lane; a lane is one row's one head.

What `fused_walk` does with torch's operations on all lanes of a group at once, a kernel does on one after another: its
state stays in the cache. What is kept between spans is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .fused_plan import Arguments, Plan, ReverseWalk, Tile
from .fused_runs import tile_lengths
from .gate_products import LEAST, LOG_FLOOR

Gates = tuple[Tensor | None, ...]
"""log_keep, momentum and lr of one matrix"""


@dataclass
class LaneRun:
    """Neighbouring tiles of `size` tokens for n = B x N lanes: what a kernel's calls need beside the state.

    key, query [B, J size, N, F] and value [B, J size, N, D], stride 1 in the last dim; gates per matrix (log_keep,
    momentum, lr) [B, J size, N]; norm (weight, bias) [n, 1, D] or empty; dot: the objective is the dot product, else
    l2; folds: reads add q, and the target is v - k unless `dot`; floor, least: of products
    of gates (`gate_products`)
    """

    size: int
    opens: list[bool]
    ends: list[bool]
    cut: slice
    key: Tensor
    query: Tensor
    value: Tensor
    gates: list[Gates]
    norm: list[Tensor]
    dot: bool
    folds: bool
    floor: float
    least: float


@dataclass
class LaneGrads:
    """Where a kernel's backward writes: tokens' and gates' as LaneRun's; adds to norm's [n, 1, D]."""

    dreads: Tensor
    key: Tensor
    query: Tensor
    value: Tensor
    gates: list[Gates]
    norm: list[Tensor]


class LaneKernel(Protocol):
    """Walks the tiles of a run, stacks per matrix [n, r, out, in] and anchor [n, out, in] in place.

    Where it walks one lane, anchor is that lane's alone, [1, out, in].
    """

    def takes(self, objective: str, depth: int, like: Tensor) -> bool:
        """Whether it computes this objective on tensors such as `like`, now."""

    def forward(self, run: LaneRun, stacks: list[Tensor], anchor: list[Tensor], reads: Tensor) -> None:
        """Writes reads [B, J size, N, D] of all lanes."""

    def room(self, run: LaneRun, stacks: list[Tensor]) -> Tensor:
        """Where `again` keeps one lane of this run."""

    def again(
        self, run: LaneRun, lane: int, stacks: list[Tensor], anchor: list[Tensor], kept: Tensor, goes_on: bool
    ) -> None:
        """One lane without reading: keeps what `backward` needs; unless it goes_on, nobody wants the state after it."""

    def backward(
        self,
        run: LaneRun,
        lane: int,
        kept: Tensor,
        anchor: list[Tensor],
        grads: LaneGrads,
        dstacks: list[Tensor],
        danchor: list[Tensor],
    ) -> None:
        """One lane in reverse; dstacks from those after the run to those at its start, danchor gathers."""


KERNELS: dict[str, LaneKernel] = {}
"""device type -> its kernel; the scans of a device without one are torch's operations"""


def kernel_for(plan: Plan, flat: Sequence[Tensor]) -> LaneKernel | None:
    """The kernel that walks this plan on these arguments, if there is one.

    It is handed addresses: a tensor of another device or dtype would be read as if it were of the first's. Such
    arguments are left to torch's operations, which say what is wrong.
    """
    like, rule = flat[0], plan.rule
    kernel = KERNELS.get(like.device.type)
    if kernel is None or any(x.device != like.device or x.dtype != like.dtype for x in flat):
        return None
    objective = "l2" if rule.objective == "lp" and rule.p == 2.0 else rule.objective
    return kernel if kernel.takes(objective, plan.depth, like) else None


class LaneScan(torch.autograd.Function):
    """(plan, kernel, flat arguments) -> reads [B, T, N, D], W and S after the last token, the open chunk's anchor."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, kernel: LaneKernel, *flat: Tensor) -> tuple[Tensor, ...]:
        ctx.plan, ctx.kernel, arguments = plan, kernel, Arguments.unpack(plan, flat)
        ctx.save_for_backward(*flat)
        reads = torch.empty_like(arguments.value, memory_format=torch.contiguous_format)
        ctx.kept = []
        if plan.replays:
            return (reads, *arguments.blank_states(plan))
        stacks = arguments.stacks()
        anchor = [x.clone(memory_format=torch.contiguous_format) for x in arguments.anchor]
        ctx.kept = [stack.new_empty(len(plan.spans) - 1, *stack.shape) for stack in stacks]
        for j, span in enumerate(plan.spans):
            for block, stack in zip(ctx.kept, stacks if j else [], strict=bool(j)):
                block[j - 1] = stack
            for run in lane_runs(plan, arguments, span):
                kernel.forward(run, stacks, anchor, reads[:, run.cut])
        rows = [stack[:, r].clone() for r in range(1 + bool(arguments.momenta)) for stack in stacks]
        return (reads, *rows, *(anchor if plan.leaves_anchor else []))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        plan, arguments = ctx.plan, Arguments.unpack(ctx.plan, ctx.saved_tensors)
        walk = _Backward(plan, ctx.kernel, arguments, grads)
        for j in range(len(plan.spans) - 1, 0, -1):
            walk.span(plan.spans[j], [block[j - 1] for block in ctx.kept])
        walk.span(plan.spans[0], arguments.stacks())
        return (None, None, *walk.result().pack())


def lane_runs(plan: Plan, arguments: Arguments, span: Sequence[Tile]) -> list[LaneRun]:
    """The runs of a span, in order."""
    runs, rule = [], plan.rule
    for size, tiles, cut in tile_lengths(span):
        opens, ends = ([getattr(tile, name) for tile in tiles] for name in ("opens", "ends"))
        key, query, value = (x[:, cut] for x in (arguments.key, arguments.query, arguments.value))
        gates = _cut_gates(arguments, cut)
        norm = [x for x in (arguments.norm_weight, arguments.norm_bias) if x is not None]
        dot = rule.objective == "dot"
        limits = LOG_FLOOR[key.dtype], LEAST[key.dtype]
        runs.append(LaneRun(size, opens, ends, cut, key, query, value, gates, norm, dot, plan.folds_residual, *limits))
    return runs


def _cut_gates(arguments: Arguments, cut: slice) -> list[Gates]:
    return [tuple(x if x is None else x[:, cut] for x in one) for one in arguments.gates]


class _Backward(ReverseWalk):
    """The reverse walk: gradients of the running state go from span to span, all others are gathered."""

    def __init__(self, plan: Plan, kernel: LaneKernel, arguments: Arguments, grads: Sequence[Tensor]) -> None:
        super().__init__(plan, arguments, grads)
        self.kernel = kernel
        self.dreads = self.dreads if self.dreads.stride(-1) == 1 else self.dreads.contiguous()

    def span(self, span: Sequence[Tile], stacks: list[Tensor]) -> None:
        """Lane by lane, recompute the span's states and inner gradients, then take its runs in reverse."""
        runs = lane_runs(self.plan, self.arguments, span)
        grads = [self._grads(run) for run in runs]
        rooms = [self.kernel.room(run, stacks) for run in runs]
        stacks = stacks if len(runs) == 1 else [x.clone() for x in stacks]
        for lane in range(len(stacks[0])):
            known: list[list[Tensor]] = []
            anchor = [x[lane : lane + 1].contiguous() for x in self.arguments.anchor]
            for run, kept in zip(runs, rooms, strict=True):
                known.append(anchor)
                anchor = anchor if all(run.ends) else [x.clone() for x in anchor]
                self.kernel.again(run, lane, stacks, anchor, kept, run is not runs[-1])
            for run, kept, found in zip(reversed(runs), reversed(rooms), reversed(grads), strict=True):
                self.kernel.backward(run, lane, kept, known.pop(), found, self.dstacks, self.danchor)

    def _grads(self, run: LaneRun) -> LaneGrads:
        to = self.gathered
        dreads, key, query, value = (x[:, run.cut] for x in (self.dreads, to.key, to.query, to.value))
        norm = [x for x in (to.norm_weight, to.norm_bias) if x is not None]
        return LaneGrads(dreads, key, query, value, _cut_gates(to, run.cut), norm)
