"""The tiles of a memory's scan on CPUs: the calls of cpu_scan.c.

The kernel has the methods of `miras_megatron.memory.fused_lanes.LaneKernel`, where shapes are told; it walks MLP and
matrix memories of depth 1 to 4 under the l2 and the dot objective, in float32 and float64.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

DEEPEST = 4
MOST_THREADS = 2
"""Lanes are walked one after another, and only BLAS may use more threads: with more than it has been measured with,
torch's operations may be faster."""
Integer, Pointer = ctypes.c_int64, ctypes.c_void_p


class Rows(ctypes.Structure):
    """A token tensor of one lane: row t at first + t apart."""

    _fields_ = (("first", Pointer), ("apart", Integer))


class Gates(ctypes.Structure):
    """One matrix's gates, or their gradients; null where there is none."""

    _fields_ = (("log_keep", Rows), ("momentum", Rows), ("rate", Rows))


class Lane(ctypes.Structure):
    """`Lane` of cpu_scan.c, field by field."""

    _fields_ = (
        ("gemm", Pointer),
        *((name, Integer) for name in ("depth", "r", "tiles", "c")),
        ("widths", Integer * (DEEPEST + 1)),
        *((name, Integer) for name in ("dot", "folds", "ends_walk")),
        *((name, ctypes.c_double) for name in ("floor", "least")),
        *((name, Pointer) for name in ("opens", "ends")),
        *((name, Rows) for name in ("key", "query", "value", "reads")),
        ("gates", Gates * DEEPEST),
        *((name, Pointer) for name in ("norm_weight", "norm_bias")),
        *((name, Pointer * DEEPEST) for name in ("stacks", "anchor")),
        *((name, Pointer) for name in ("kept", "scratch")),
        *((name, Rows) for name in ("dkey", "dquery", "dvalue", "dreads")),
        ("dgates", Gates * DEEPEST),
        *((name, Pointer) for name in ("dnorm_weight", "dnorm_bias")),
        *((name, Pointer * DEEPEST) for name in ("dstacks", "danchor")),
    )


COUNTS, WALKS = ("lane_bytes", "kept_elements", "scratch_elements"), ("scan_forward", "scan_again", "scan_backward")
"""cpu_scan.c's functions, those that return a number first"""


def why_unfit(library: ctypes.CDLL) -> str:
    """Declares what the library's functions return; why it isn't this file's kernel, "" if it is."""
    if missing := [name for name in (*COUNTS, *WALKS) if not hasattr(library, name)]:
        return f"it has no {', '.join(missing)}"
    for name in COUNTS:
        getattr(library, name).restype = Integer
    theirs, ours = library.lane_bytes(), ctypes.sizeof(Lane)
    return "" if theirs == ours else f"its Lane has {theirs} bytes, that of cpu_scan.py {ours}"


class CpuScan:
    """The compiled walk; `libraries` that `why_unfit` knows and `products` (sgemm, dgemm) per dtype."""

    def __init__(self, libraries: dict[torch.dtype, ctypes.CDLL], products: dict[torch.dtype, int]) -> None:
        self._libraries, self._products = libraries, products

    def takes(self, objective: str, depth: int, like: Tensor) -> bool:
        """Float32 and float64, l2 and dot, as deep as rules are, on few threads."""
        known = objective in ("l2", "dot") and depth <= DEEPEST and like.dtype in self._libraries
        return known and like.numel() > 0 and torch.get_num_threads() <= MOST_THREADS

    def forward(self, run: Any, stacks: list[Tensor], anchor: list[Tensor], reads: Tensor) -> None:
        """All lanes: writes reads, and stacks and anchor in place."""
        task = self._task(run, stacks)
        scratch = None
        for lane in range(len(stacks[0])):
            self._place(task, run, lane, stacks)
            task.lane.reads = _rows(reads, lane)
            _fill(task.lane.anchor, anchor, lane)
            scratch = task.room("scratch") if scratch is None else scratch
            task.call("scan_forward", scratch)

    def room(self, run: Any, stacks: list[Tensor]) -> Tensor:
        """Where `again` keeps one lane of this run."""
        return self._task(run, stacks).room("kept")

    def again(
        self, run: Any, lane: int, stacks: list[Tensor], anchor: list[Tensor], kept: Tensor, goes_on: bool
    ) -> None:
        """One lane without reading; keeps what `backward` needs."""
        task = self._task(run, stacks)
        self._place(task, run, lane, stacks)
        task.lane.ends_walk = not goes_on
        _fill(task.lane.anchor, anchor, 0)
        task.lane.kept, scratch = kept.data_ptr(), task.room("scratch")
        task.call("scan_again", scratch)

    def backward(
        self,
        run: Any,
        lane: int,
        kept: Tensor,
        anchor: list[Tensor],
        grads: Any,
        dstacks: list[Tensor],
        danchor: list[Tensor],
    ) -> None:
        """One lane in reverse."""
        task = self._task(run, dstacks)
        self._place(task, run, lane, dstacks)
        to = task.lane
        to.dkey, to.dquery, to.dvalue = (_rows(x, lane) for x in (grads.key, grads.query, grads.value))
        to.dreads = _rows(grads.dreads, lane)
        _fill_gates(to.dgates, grads.gates, lane)
        if grads.norm:
            to.dnorm_weight, to.dnorm_bias = (_at(x, lane) for x in grads.norm)
        for field, matrices, index in (
            (to.anchor, anchor, 0),
            (to.dstacks, dstacks, lane),
            (to.danchor, danchor, lane),
        ):
            _fill(field, matrices, index)
        to.kept = kept.data_ptr()
        task.call("scan_backward", task.room("scratch"))

    def _task(self, run: Any, stacks: list[Tensor]) -> _Task:
        dtype = stacks[0].dtype
        lane = Lane(
            gemm=self._products[dtype], depth=len(stacks), r=stacks[0].shape[1], tiles=len(run.opens), c=run.size
        )
        lane.widths[:] = _padded([stacks[0].shape[3], *(x.shape[2] for x in stacks)], DEEPEST + 1)
        lane.dot, lane.folds, lane.floor, lane.least = run.dot, run.folds, run.floor, run.least
        return _Task(self._libraries[dtype], lane, run, stacks[0])

    def _place(self, task: _Task, run: Any, lane: int, stacks: list[Tensor]) -> None:
        """Everything that forward and backward read of one lane."""
        to = task.lane
        to.key, to.query, to.value = (_rows(x, lane) for x in (run.key, run.query, run.value))
        _fill_gates(to.gates, run.gates, lane)
        if run.norm:
            to.norm_weight, to.norm_bias = (_at(x, lane) for x in run.norm)
        _fill(to.stacks, stacks, lane)


class _Task:
    """A lane being filled, and what keeps its memory alive."""

    def __init__(self, library: ctypes.CDLL, lane: Lane, run: Any, like: Tensor) -> None:
        self.library, self.lane, self.like = library, lane, like
        self.flags = (ctypes.c_uint8 * len(run.opens))(*run.opens), (ctypes.c_uint8 * len(run.ends))(*run.ends)
        lane.opens, lane.ends = (ctypes.addressof(flags) for flags in self.flags)

    def room(self, purpose: str) -> Tensor:
        """Memory for what is "kept" or for "scratch", as much as the lane needs."""
        return self.like.new_empty(getattr(self.library, f"{purpose}_elements")(ctypes.byref(self.lane)))

    def call(self, name: str, scratch: Tensor) -> None:
        self.lane.scratch = scratch.data_ptr()
        getattr(self.library, name)(ctypes.byref(self.lane))


def _at(x: Tensor, lane: int) -> int:
    """The address of x[lane]."""
    return x.data_ptr() + lane * x.stride(0) * x.element_size()


def _rows(x: Tensor | None, lane: int) -> Rows:
    """Lane b N + h of x [B, T, N] or [B, T, N, width]."""
    if x is None:
        return Rows()
    row, head = divmod(lane, x.shape[2])
    first = x.data_ptr() + (row * x.stride(0) + head * x.stride(2)) * x.element_size()
    return Rows(first, x.stride(1) if x.shape[1] > 1 else x[0, 0, 0].numel())


def _fill(field: Any, matrices: Sequence[Tensor], lane: int) -> None:
    field[:] = _padded([_at(x, lane) for x in matrices], DEEPEST)


def _fill_gates(field: Any, gates: Sequence[tuple[Tensor | None, ...]], lane: int) -> None:
    for i, one in enumerate(gates):
        field[i] = Gates(*(_rows(x, lane) for x in one))


def _padded(values: list[int], count: int) -> tuple[int, ...]:
    return (*values, *[0] * (count - len(values)))
