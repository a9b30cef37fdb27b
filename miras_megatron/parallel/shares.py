"""A flat tensor of which each rank of a group has a part: brought together on one rank, and dealt out again.

The keeper of a tensor is the rank that has most of it; those that have as much take turns. Of many tensors laid end to
end and cut into one part a rank, only those that lie across a cut travel at all; where each tensor is cut into equal
parts, all travel. Either way every rank keeps about as much as it had. What was brought together from several ranks
lies in host memory: a device needs room for one whole tensor.
All ranks of the group call these in the same order; each waits only for calls before its own, so nobody waits forever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

OWN = "brought_together"
"""The attribute of a tensor that `collect_parts` has made."""

Span = tuple[int, int]
"""(first, behind the last) of a rank's numbers in the flat tensor; empty where both are equal."""


def keeper_of(spans: list[Span], turn: int) -> int:
    """The rank of the group that has most of the tensor; of equals the `turn`-th, counted in circles."""
    lengths = [end - start for start, end in spans]
    equals = [rank for rank, length in enumerate(lengths) if length == max(lengths)]
    return equals[turn % len(equals)]


def collect_parts(
    part: Tensor,
    spans: list[Span],
    group: Any,
    shape: Sequence[int],
    *,
    turn: int = 0,
    device: torch.device | None = None,
) -> Tensor | None:
    """The whole tensor on its keeper (a view of its part, where it has all of it), None on the others.

    part    [n] of this rank; empty where it has none
    shape   of the whole
    turn    number of the tensor among all that are brought together
    device  through which the group sends, where `part` lies elsewhere: groups of GPUs send nothing of the host's
    """
    keeper, here, device = keeper_of(spans, turn), group.rank(), device or part.device
    if here != keeper:
        if len(part):
            dist.send(part.contiguous().to(device), dist.get_global_rank(group, keeper), group=group)
        return None
    if all(start == end for rank, (start, end) in enumerate(spans) if rank != keeper):
        return part.view(shape)
    whole = torch.empty(max(end for _, end in spans), dtype=part.dtype, device=device)
    for rank, (start, end) in enumerate(spans):
        if rank == keeper:
            whole[start:end].copy_(part)
        elif start < end:
            dist.recv(whole[start:end], dist.get_global_rank(group, rank), group=group)
    made = whole.cpu().view(shape)
    setattr(made, OWN, True)
    return made


def is_own(tensor: Tensor) -> bool:
    """Whether `tensor` was brought together here: nobody else knows its memory, which needs no copy."""
    return hasattr(tensor, OWN)


def deal_parts(
    whole: Tensor | None,
    part: Tensor,
    spans: list[Span],
    group: Any,
    *,
    turn: int = 0,
    device: torch.device | None = None,
) -> None:
    """Write into every rank's `part` its numbers of the keeper's `whole`; `turn` as it was brought together."""
    keeper, here, device = keeper_of(spans, turn), group.rank(), device or part.device
    if here != keeper:
        if len(part):
            taken = part.to(device)
            dist.recv(taken, dist.get_global_rank(group, keeper), group=group)
            part.copy_(taken)
        return
    assert whole is not None, "the keeper of a tensor deals it out"
    for rank, (start, end) in enumerate(spans):
        if rank == keeper:
            part.copy_(whole[start:end])
        elif start < end:
            own = whole[start:end].to(device, part.dtype).contiguous()
            dist.send(own, dist.get_global_rank(group, rank), group=group)
