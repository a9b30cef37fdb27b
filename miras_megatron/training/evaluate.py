"""Validation: loss in nats a token and in bits per byte, and by where in the row a token stands.

A loss that falls with position says that the memory is read; one that rises says that it fails beyond some length.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..config.schema import Run
from ..parallel.mesh import ParallelMesh
from ..parallel.together import sum_losses
from .batch import Batch
from .data import Batches, build_batches
from .job import Job
from .signs import alive
from .step import run_microbatches
from .token_sizes import count_bytes
from .tokenizer import Tokenizer


def validation_batches(run: Run, tokenizer: Tokenizer, mesh: ParallelMesh) -> Batches:
    """This rank's part of the validation rows; the same rows at every validation.

    Raises ValueError where data.validation or data.split leaves none.
    """
    return build_batches(run, tokenizer, part="validation", rank=mesh.data_rank, size=mesh.data)


def evaluate(job: Job, batches: Batches) -> dict[str, Any]:
    """Validation over evaluate.batches global batches. A collective call.

    loss           nats a token          bits_per_byte  over the bytes that the counted tokens stand for
    tokens, bytes  counted
    by_position    nats a token of evaluate.position_buckets equal parts of the row, from its start to its end
    """
    buckets = job.run.evaluate.position_buckets
    count = job.run.evaluate.batches * job.run.micro_batches(job.mesh.world_size)
    model = job.called
    model.eval()
    totals = torch.zeros(3 + 2 * buckets, dtype=torch.float64, device=job.mesh.device)
    for number in range(count):
        alive("validating")
        passed = run_microbatches(
            job, [batches.batch(number)], training=False, measure=lambda b, x: measure(b, x, job.tokenizer, buckets)
        )
        totals = sum(passed.sums, totals)
    model.train()
    nats, tokens, size, *by_position = sum_losses(job.mesh, totals).tolist()
    places = [n / max(c, 1.0) for n, c in zip(by_position[:buckets], by_position[buckets:], strict=True)]
    return {
        "loss": nats / max(tokens, 1.0),
        "bits_per_byte": nats / math.log(2) / max(size, 1.0),
        "tokens": int(tokens),
        "bytes": int(size),
        "by_position": places,
    }


def measure(batch: Batch, losses: Tensor, tokenizer: Tokenizer, buckets: int) -> Tensor:
    """[nats, tokens, bytes, nats of each bucket.., tokens of each bucket..] of losses [b, T], float64."""
    counted = (batch.loss_mask > 0).double()
    weighed = losses.detach().double() * counted
    place = batch.places().to(losses.device) * buckets // batch.row_tokens
    nats = weighed.new_zeros(buckets).index_add_(0, place, weighed.sum(0)) if buckets else weighed.new_zeros(0)
    tokens = weighed.new_zeros(buckets).index_add_(0, place, counted.sum(0)) if buckets else weighed.new_zeros(0)
    size = count_bytes(tokenizer, batch.labels[batch.loss_mask > 0])
    return torch.cat([torch.stack([weighed.sum(), counted.sum(), weighed.new_tensor(float(size))]), nats, tokens])
