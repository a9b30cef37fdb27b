"""A flat tensor of which each rank of a group has a part: brought together on one rank, and dealt out again.

The keeper of a tensor is a rank that has most of it; of several, the one that keeps least so far. Of many tensors laid
end to end and cut into one part a rank, only those that lie across a cut travel at all; where each tensor is cut into
equal parts, all travel. Either way a rank keeps about as much as it had, where no tensor alone is more than that.
What was brought together from several ranks lies in host memory: a device needs room for one whole tensor.
All ranks of the group call these in the same order; each waits only for calls before its own, so nobody waits forever.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Span = tuple[int, int]
"""(first, behind the last) of a rank's numbers in the flat tensor; empty where both are equal."""

OWN = "brought_together"
"""The attribute of a tensor that `collect_parts` has made."""


def keepers_of(tensors: Iterable[list[Span]]) -> list[int]:
    """The keeper of each tensor, a rank of the group; of each its spans are given, a rank each."""
    kept: dict[int, int] = {}
    keepers = []
    for spans in tensors:
        lengths = [end - start for start, end in spans]
        most = [rank for rank, length in enumerate(lengths) if length == max(lengths)]
        keepers.append(min(most, key=lambda rank: kept.get(rank, 0)))
        kept[keepers[-1]] = kept.get(keepers[-1], 0) + sum(lengths)
    return keepers


def room_for(part: Tensor, spans: list[Span], group: Any, shape: Sequence[int], keeper: int) -> Tensor | None:
    """What `collect_parts` would return, to be written into: no numbers in it yet where it is brought together."""
    if group.rank() != keeper:
        return None
    return part.view(shape) if _is_alone(spans, keeper) else torch.empty(tuple(shape), dtype=part.dtype)


def collect_parts(
    part: Tensor,
    spans: list[Span],
    group: Any,
    shape: Sequence[int],
    *,
    keeper: int,
    device: torch.device | None = None,
) -> Tensor | None:
    """The whole tensor on its keeper (a view of its part, where it has all of it), None on the others.

    part    [n] of this rank; empty where it has none
    shape   of the whole
    device  through which the group sends, where `part` lies elsewhere: groups of GPUs send nothing of the host's
    """
    device = device or part.device
    if group.rank() != keeper:
        if len(part):
            _exchange([(dist.isend, part.contiguous().to(device), keeper)], group)
        return None
    if _is_alone(spans, keeper):
        return part.view(shape)
    whole = torch.empty(max(end for _, end in spans), dtype=part.dtype, device=device)
    whole[slice(*spans[keeper])].copy_(part)
    _exchange([(dist.irecv, whole[start:end], rank) for rank, start, end in _others(spans, keeper)], group)
    made = whole.cpu().view(shape)
    setattr(made, OWN, True)
    return made


def is_own(tensor: Tensor) -> bool:
    """Whether `tensor` was brought together here, so that nobody else changes it. A view of it no longer says so."""
    return hasattr(tensor, OWN)


def deal_parts(
    whole: Tensor | None,
    part: Tensor,
    spans: list[Span],
    group: Any,
    *,
    keeper: int,
    device: torch.device | None = None,
) -> None:
    """Write into every rank's `part` its numbers of the keeper's `whole`, in any shape."""
    device = device or part.device
    if group.rank() != keeper:
        if len(part):
            taken = part if part.device == device else torch.empty_like(part, device=device)
            _exchange([(dist.irecv, taken, keeper)], group)
            part.copy_(taken)
        return
    assert whole is not None, "the keeper of a tensor deals it out"
    flat = whole.reshape(-1)
    part.copy_(flat[slice(*spans[keeper])])
    sent = [(rank, flat[start:end].to(device, part.dtype)) for rank, start, end in _others(spans, keeper)]
    _exchange([(dist.isend, own.contiguous(), rank) for rank, own in sent], group)


def _is_alone(spans: list[Span], keeper: int) -> bool:
    return not list(_others(spans, keeper))


def _others(spans: list[Span], keeper: int) -> Iterable[tuple[int, int, int]]:
    """(rank, first, behind the last) of those that have anything, but the keeper."""
    return ((rank, start, end) for rank, (start, end) in enumerate(spans) if rank != keeper and start < end)


def _exchange(sends: list[tuple[Any, Tensor, int]], group: Any) -> None:
    """Send and receive all at once: alone each would make NCCL a communicator of its own for every pair of ranks."""
    if sends:
        ops = [dist.P2POp(does, tensor, dist.get_global_rank(group, rank), group) for does, tensor, rank in sends]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
