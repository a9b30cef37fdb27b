"""The states of lanes while groups of them take turns (see `segments`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils import _pytree as pytree

from ..memory import MemoryState
from .documents import join_trees, select_rows
from .segments import Group, Plan

Tree = dict[str, Any]
Pools = dict[int, tuple[Tree, int]]
"""lane -> the tree that holds it and its row there"""


class LaneStates:
    """Hands each group the states of its lanes, and takes them back.

    `state` is what MAC carries between calls, or None; `start(n)` makes the memory of n fresh lanes.
    """

    def __init__(self, plan: Plan, state: Tree | None, start: Callable[[int], MemoryState]):
        self.plan, self.state = plan, state
        self.lanes: Pools = {}
        self.opened: Pools = {}
        self.places: dict[int, int] = {}
        fresh = [lane for lane, new in enumerate(plan.fresh) if new]
        if state is not None:
            going_on = [lane for lane, new in enumerate(plan.fresh) if not new]
            self._hold(self.lanes, going_on, _rows_of(state["lane"], [plan.rows[lane] for lane in going_on]))
        if fresh:
            tails = {} if state is None else {n: x for n, x in state["lane"].items() if n != "memory"}
            empty = {name: x.new_zeros(len(fresh), *x.shape[1:]) for name, x in tails.items()}
            self._hold(self.lanes, fresh, empty | {"memory": start(len(fresh))})

    def take(self, group: Group) -> tuple[Tree, Tree]:
        """The lanes' states, and what they carry of their open segments."""
        lane = collect_lanes(self.lanes, group.lanes)
        if group.first == 0:
            return lane, {"start": lane["memory"]}
        assert self.state is not None
        return lane, _rows_of(self.state["open"], [self.plan.rows[number] for number in group.lanes])

    def put(self, group: Group, lane: Tree, opened: Tree, segment: int) -> None:
        """The states after the group's tokens; open segments are kept for the last lanes of rows only."""
        self._hold(self.lanes, group.lanes, lane)
        self.places |= dict.fromkeys(group.lanes, (group.first + group.length) % segment)
        if self.plan.end_states and not set(group.lanes).isdisjoint(self.plan.last):
            self._hold(self.opened, group.lanes, opened)

    def rows(self, segment: int, growing: Sequence[str]) -> Tree:
        """The state of every batch row after its last token; `growing` parts of open segments padded to `segment`."""
        if not self.plan.end_states:
            return {}
        last = self.plan.last
        for tree in {id(tree): tree for tree, _ in self.opened.values()}.values():
            tree |= {name: _padded(tree[name], segment) for name in growing}
        return {
            "lane": collect_lanes(self.lanes, last),
            "open": collect_lanes(self.opened, last),
            "position": torch.tensor([self.places[lane] for lane in last]),
        }

    def _hold(self, pools: Pools, lanes: Sequence[int], tree: Tree) -> None:
        pools |= {lane: (tree, row) for row, lane in enumerate(lanes)}


def _padded(x: Tensor, length: int) -> Tensor:
    return pad(x, (0, 0, 0, 0, 0, length - x.shape[1]))


def _rows_of(tree: Tree, rows: list[int]) -> Tree:
    """The batch rows `rows`, without a copy where these are all."""
    count = next(x.shape[0] for x in pytree.tree_leaves(tree) if isinstance(x, Tensor))
    return tree if rows == list(range(count)) else select_rows(tree, rows)


def collect_lanes(pools: Pools, lanes: Sequence[int]) -> Tree:
    """One tree with the given lanes in order, without a copy where one holds just these."""
    trees = {id(pools[lane][0]): pools[lane][0] for lane in lanes}
    members = {key: [lane for lane in lanes if pools[lane][0] is tree] for key, tree in trees.items()}
    parts = [_rows_of(tree, [pools[lane][1] for lane in members[key]]) for key, tree in trees.items()]
    joined = [lane for group in members.values() for lane in group]
    tree = join_trees(parts)
    return tree if joined == list(lanes) else select_rows(tree, [joined.index(lane) for lane in lanes])
