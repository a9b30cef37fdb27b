"""Where AdamW keeps the moments and float32 master of each weight: here as a whole, or in parts over ranks.

With optimizer.distributed megatron-core lays the weights of one dtype end to end and cuts them into one part for each
data- and context-parallel rank, wherever a cut falls. A checkpoint knows whole weights: `Place.whole` and `Place.put`
go between the two, so that what lies on the disk is the same with and without.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import DistributedOptimizer, MegatronOptimizer
from torch import Tensor

from ..parallel.shares import Span, collect_parts, deal_parts, keepers_of


@dataclass(frozen=True)
class Place:
    """Of one weight.

    weight   the model's parameter
    updated  what AdamW updates on this rank: the weight, its master, or a flat part of one. None: nothing of it
    spans    which numbers of the flat weight each rank of `group` updates. None: every rank all of them
    group    the ranks that share it
    """

    weight: Tensor
    updated: Tensor | None
    spans: list[Span] | None = None
    group: Any = None

    @property
    def has_master(self) -> bool:
        """Whether what is updated is a float32 copy."""
        return self.weight.dtype != torch.float32

    def whole(self, values: Tensor | None) -> Tensor | None:
        """The whole of `values`, shaped like the weight, or None where another rank keeps it. A collective call.

        values  of what is updated here; None where nothing is
        """
        if self.spans is None:
            return values
        part = values if values is not None else self._nothing()
        (keeper,) = keepers_of([self.spans])
        return collect_parts(part.detach(), self.spans, self.group, self.weight.shape, keeper=keeper)

    def put(self, whole: Tensor | None, values: Tensor | None) -> None:
        """The way back: write into `values` what `whole` says. A collective call."""
        if self.spans is not None:
            part = values if values is not None else self._nothing()
            (keeper,) = keepers_of([self.spans])
            deal_parts(whole, part, self.spans, self.group, keeper=keeper)
        elif values is not None:
            assert whole is not None, "a weight that every rank updates was read by every rank"
            values.copy_(whole)

    def own_gradient(self, gradient: Tensor) -> Tensor:
        """Of the weight's gradient what was summed over ranks on this rank."""
        if self.spans is None:
            return gradient
        start, end = self.spans[self.group.rank()]
        return gradient.view(-1)[start:end]

    def _nothing(self) -> Tensor:
        return torch.empty(0, dtype=torch.float32, device=self.weight.device)


def find_places(optimizer: MegatronOptimizer, weights: Iterable[Tensor]) -> dict[int, Place]:
    """id(weight) -> its place, for the trained ones among `weights`.

    Raises ValueError where a trained parameter isn't in `weights`.
    """
    (inner,) = optimizer.chained_optimizers
    found = _shared_places(inner) if isinstance(inner, DistributedOptimizer) else _own_places(optimizer, weights)
    known = {id(weight) for weight in weights}
    lost = len(found.keys() - known)
    if lost:
        raise ValueError(f"{lost} trained parameters are not in the model's sharded state, so they can't be saved")
    return found


def _own_places(optimizer: MegatronOptimizer, weights: Iterable[Tensor]) -> dict[int, Place]:
    trained = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    found = {}
    for weight in weights:
        master = trained.pop(id(getattr(weight, "main_param", weight)), None)
        if master is not None:
            found[id(weight)] = Place(weight, master)
    return found | {id(p): Place(p, p) for p in trained.values()}


def _shared_places(optimizer: Any) -> dict[int, Place]:
    updated = {id(weight): part for weight, part in _pairs(optimizer)}
    group, found = optimizer.data_parallel_group, {}
    for buffer in optimizer.buffers:
        for weight, (start, end, number) in buffer.param_index_map.items():
            bucket = buffer.buckets[number]
            length = bucket.grad_data.numel() // group.size()
            cuts = [bucket.offset + rank * length for rank in range(group.size() + 1)]
            spans = [
                (min(max(first, start), end) - start, min(max(behind, start), end) - start)
                for first, behind in zip(cuts, cuts[1:], strict=False)
            ]
            found[id(weight)] = Place(weight, updated.get(id(weight)), spans, group)
    return found


def _pairs(optimizer: Any) -> list[tuple[Tensor, Tensor]]:
    """(weight, the part of it or of its master that is updated here)."""
    sides = (
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
    )
    return [
        pair
        for weights, parts in sides
        for group, own in zip(weights, parts, strict=True)
        for pair in zip(group, own, strict=True)
    ]
