"""Cross entropy of each token over a vocabulary that tensor-parallel ranks share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor


def token_losses(logits: Tensor, labels: Tensor, group: Any) -> Tensor:
    """-log softmax(logits)[label], in nats.

    logits  [s, b, V / tp], this rank's part; overwritten where they are float32
    labels  [s, b] int64 below V
    returns [s, b] float32; float64 for float64 logits, by a path of its own, since core's works in float32
    """
    if logits.dtype == torch.float64:
        return _wide_losses(logits, labels, group)
    losses: Tensor = vocab_parallel_cross_entropy(logits.contiguous(), labels)
    return losses


def _wide_losses(logits: Tensor, labels: Tensor, group: Any) -> Tensor:
    """The same in the logits' own dtype, for tests that compare to the last digit."""
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    add: Any = SumOverRanks.apply
    total = add((logits - largest[..., None]).exp().sum(-1), group)
    local = labels - group.rank() * logits.shape[-1]
    mine = (local >= 0) & (local < logits.shape[-1])
    picked = logits.gather(-1, local.clamp(0, logits.shape[-1] - 1)[..., None])[..., 0]
    chosen = add(picked * mine, group)
    losses: Tensor = total.log() + largest - chosen
    return losses


class SumOverRanks(torch.autograd.Function):
    """The sum of all ranks' x, on all ranks; each rank's x counts once, so backward passes the gradient on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
