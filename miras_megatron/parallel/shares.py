"""A flat tensor of which each rank of a group has a part: brought together on one rank, and dealt out again.

The keeper of a tensor is the rank that has most of it. Of many tensors laid end to end and cut into one part a
rank, only those that lie across a cut travel at all, and every rank keeps about as much as it had.
All ranks of the group call these in the same order; each waits only for calls before its own, so nobody waits forever.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Span = tuple[int, int]
"""(first, behind the last) of a rank's numbers in the flat tensor; empty where both are equal."""


def keeper_of(spans: list[Span]) -> int:
    """The rank of the group that has most of the tensor; the first of equals."""
    return max(range(len(spans)), key=lambda rank: (spans[rank][1] - spans[rank][0], -rank))


def collect_parts(part: Tensor, spans: list[Span], group: Any) -> Tensor | None:
    """The whole flat tensor on its keeper (its very part, where it has all of it), None on the others.

    part  [n] of this rank; empty where it has none
    """
    keeper, here = keeper_of(spans), group.rank()
    if here != keeper:
        if len(part):
            dist.send(part.contiguous(), dist.get_global_rank(group, keeper), group=group)
        return None
    if all(start == end for rank, (start, end) in enumerate(spans) if rank != keeper):
        return part
    whole = torch.empty(max(end for _, end in spans), dtype=part.dtype, device=part.device)
    for rank, (start, end) in enumerate(spans):
        if rank == keeper:
            whole[start:end].copy_(part)
        elif start < end:
            dist.recv(whole[start:end], dist.get_global_rank(group, rank), group=group)
    return whole


def deal_parts(whole: Tensor | None, part: Tensor, spans: list[Span], group: Any) -> None:
    """Write into every rank's `part` its numbers of the keeper's `whole`."""
    keeper, here = keeper_of(spans), group.rank()
    if here != keeper:
        if len(part):
            dist.recv(part, dist.get_global_rank(group, keeper), group=group)
        return
    assert whole is not None, "the keeper of a tensor deals it out"
    for rank, (start, end) in enumerate(spans):
        if rank == keeper:
            part.copy_(whole[start:end])
        elif start < end:
            dist.send(whole[start:end].to(part).contiguous(), dist.get_global_rank(group, rank), group=group)
