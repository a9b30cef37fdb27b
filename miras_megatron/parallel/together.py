"""What ranks agree on: small answers that every rank needs alike, for code that must not know torch.distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from .mesh import ParallelMesh


def gather_objects(mesh: ParallelMesh, value: Any) -> list[Any]:
    """Every rank's `value`, by rank, on every rank. For small plain data: it travels pickled."""
    if mesh.world_size == 1:
        return [value]
    values: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(values, value)
    return values


def any_rank(mesh: ParallelMesh, here: bool) -> bool:
    """Whether `here` is true on any rank; the same answer on all."""
    if mesh.world_size == 1:
        return here
    flag = torch.tensor(int(here), device=mesh.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def largest(mesh: ParallelMesh, here: float) -> float:
    """The largest `here` of all ranks."""
    if mesh.world_size == 1:
        return here
    number = torch.tensor(here, dtype=torch.float64, device=mesh.device)
    dist.all_reduce(number, op=dist.ReduceOp.MAX)
    return float(number)


def agreed(mesh: ParallelMesh, *here: float) -> list[float]:
    """The same numbers on every rank: those of the first rank that has one which isn't finite, else of rank 0.

    For numbers that are alike but for rounding, where a decision hangs on them.
    """
    if mesh.world_size == 1:
        return list(here)
    own = torch.tensor(here, dtype=torch.float64, device=mesh.device)
    found = [torch.empty_like(own) for _ in range(mesh.world_size)]
    dist.all_gather(found, own)
    wrong = [numbers for numbers in found if not bool(numbers.isfinite().all())]
    numbers: list[float] = (wrong or found)[0].tolist()
    return numbers


def sum_losses(mesh: ParallelMesh, sums: Tensor) -> Tensor:
    """`sums` of the last pipeline stage, added over data-parallel (and context) ranks, on every rank.

    sums  float64, of equal shape on every rank; other stages pass zeros
    """
    total = sums.clone()
    if mesh.world_size > 1:
        dist.all_reduce(total, group=mesh.groups.dp_cp)
        last = dist.get_process_group_ranks(mesh.groups.pp)[-1]
        dist.broadcast(total, src=last, group=mesh.groups.pp)
    return total
