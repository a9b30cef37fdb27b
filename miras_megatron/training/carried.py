"""Memory states that outlive a step: packing "ordered" reads long documents over many steps (truncated BPTT).

A lane is a row's place in the global batch; its rows follow each other in time. After a step each lane's state is
kept, cut from the graph; the next row of the lane goes on from it unless it begins a document.
Also: a pytree of states as named tensors and a line of JSON, the form in which checkpoints and sessions store it.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .batch import Batch

logger = logging.getLogger(__name__)

NODES = (None, "builtins.dict", "builtins.list", "builtins.tuple", "miras_megatron.MemoryState")
"""What a state's tree is made of, as pytree names it; None is a leaf."""


class CarriedStates:
    """Lane -> the pytree of states (batch of 1) after the lane's last row."""

    def __init__(self) -> None:
        self.lanes: dict[int, Any] = {}

    def groups(self, batch: Batch) -> list[tuple[list[int], Any]]:
        """The rows of `batch` that start fresh, and those that go on: (row numbers, states or None) each, none empty.

        A lane whose state isn't here (the run has rolled back) starts fresh, and says so. After a skipped step it goes
        on from the state before that.
        """
        lanes, reset = batch.lanes.tolist(), batch.reset.tolist()
        going_on = [row for row, lane in enumerate(lanes) if not reset[row] and lane in self.lanes]
        fresh = [row for row in range(len(lanes)) if row not in going_on]
        lost = [lanes[row] for row in fresh if not reset[row]]
        if lost:
            logger.warning("lanes %s go on inside a document without their state: they start afresh", lost)
        groups: list[tuple[list[int], Any]] = [(fresh, None)] if fresh else []
        return groups + ([(going_on, join_rows([self.lanes[lanes[row]] for row in going_on]))] if going_on else [])

    def keep(self, lanes: list[int], states: Any) -> None:
        """Keep the states after one row of each of `lanes`, cut from the graph."""
        for row, lane in enumerate(lanes):
            self.lanes[lane] = pytree.tree_map(
                lambda x: x.detach().clone() if isinstance(x, Tensor) else x, take_rows(states, row, row + 1)
            )


def take_rows(states: Any, start: int, stop: int) -> Any:
    """Rows start..stop-1 of every tensor of a pytree with the batch in dim 0."""
    return pytree.tree_map(lambda x: x[start:stop] if isinstance(x, Tensor) else x, states)


def join_rows(parts: list[Any]) -> Any:
    """One pytree with the rows of all `parts`; what is no tensor is the first one's."""
    columns = zip(*(pytree.tree_leaves(part) for part in parts), strict=True)
    leaves = [torch.cat(column) if isinstance(column[0], Tensor) else column[0] for column in columns]
    return pytree.tree_unflatten(leaves, pytree.tree_structure(parts[0]))


def pack_states(states: Any) -> tuple[str, dict[str, Tensor]]:
    """A pytree as (layout, tensors): layout is JSON, with the plain values in it; tensors are named 0, 1, .."""
    leaves, spec = pytree.tree_flatten(states)
    plain = {str(i): leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
    layout = json.dumps({"spec": pytree.treespec_dumps(spec), "plain": plain, "leaves": len(leaves)})
    return layout, {str(i): leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}


def unpack_states(layout: str, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `pack_states`. Raises ValueError where a tensor is missing or the tree holds anything else."""
    described = json.loads(layout)
    _refuse_foreign_nodes(json.loads(described["spec"])[1])
    found = described["plain"] | tensors
    missing = [i for i in map(str, range(described["leaves"])) if i not in found]
    if missing:
        raise ValueError(f"tensor {missing[0]} of {described['leaves']} is missing")
    leaves = [found[str(i)] for i in range(described["leaves"])]
    return pytree.tree_unflatten(leaves, pytree.treespec_loads(described["spec"]))


def _refuse_foreign_nodes(node: dict[str, Any]) -> None:
    """Raise ValueError for a node that no state has: torch imports whatever modules the contexts of some name."""
    if node["type"] not in NODES or "__enum__" in str(node["context"]):
        raise ValueError(f"a node of type {node['type']}: states hold only {', '.join(filter(None, NODES))}")
    for child in node["children_spec"]:
        _refuse_foreign_nodes(child)
