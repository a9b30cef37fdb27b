"""Which choices of an engine go together (docs/zero.md): told before anything starts, and without torch."""

from __future__ import annotations

from collections.abc import Iterator

from .context import pieces_of
from .schema import Run


def engine_problems(run: Run) -> Iterator[str]:
    """What doesn't fit to optimizer.engine; one line each."""
    yield from _of_deepspeed(run) if run.optimizer.engine == "deepspeed" else _of_megatron(run)


def _of_megatron(run: Run) -> Iterator[str]:
    optimizer = run.optimizer
    if optimizer.zero is not None:
        yield f'optimizer.zero = {optimizer.zero}: only with optimizer.engine "deepspeed"; set that, or null'
    if optimizer.offload:
        yield 'optimizer.offload = true: only with optimizer.engine "deepspeed"; set that, or false'


def _of_deepspeed(run: Run) -> Iterator[str]:
    optimizer, parallel = run.optimizer, run.parallel
    stage = optimizer.zero_stage
    if not 0 <= stage <= 3:
        yield f"optimizer.zero = {stage}: a stage of ZeRO, 0 to 3"
        return
    if optimizer.distributed:
        yield (
            'optimizer.distributed = true: is megatron-core\'s way of sharing; with optimizer.engine "deepspeed" '
            "ZeRO shares (optimizer.zero 1 or more); set false"
        )
    if optimizer.offload and stage == 0:
        yield "optimizer.offload = true: ZeRO 0 shares nothing that could be offloaded; set optimizer.zero to 1, 2 or 3"
    if optimizer.offload and stage == 2 and run.training.precision == "bf16":
        yield (
            "optimizer.offload = true: with optimizer.zero = 2 and training.precision = 'bf16' DeepSpeed rounds the "
            "ranks' sums of gradients to bf16; set optimizer.zero to 1 or 3, or offload to false"
        )
    if run.data.packing == "ordered":
        yield (
            "data.packing = 'ordered': rows of one step are run apart, and DeepSpeed's hooks take one backward pass a "
            'micro-batch; set optimizer.engine to "megatron", or data.packing to reset'
        )
    if parallel.pipeline > 1 and stage >= 2 and run.model.tie_embeddings:
        yield (
            f"optimizer.zero = {stage}: with parallel.pipeline = {parallel.pipeline} two stages add up their gradients "
            f"of a tied embedding before they are shared out, as ZeRO 0 and 1 allow; set 1, model.tie_embeddings to "
            f"false, or parallel.pipeline to 1"
        )
    if stage == 3:
        yield from _of_shared_weights(run)


def _of_shared_weights(run: Run) -> Iterator[str]:
    """ZeRO 3 has a weight only while its module works, and gives it away after."""
    if pieces_of(run) > 1:
        yield (
            f"optimizer.zero = 3: with parallel.pieces = {run.parallel.pieces} a piece is computed again in backward, "
            f"after its weights were given away; set optimizer.zero to 2, or parallel.pieces to 1"
        )
    if run.parallel.forwards_ahead not in ("auto", 0):
        yield (
            f"optimizer.zero = 3: with parallel.forwards_ahead = {run.parallel.forwards_ahead} the backward of one "
            f"micro-batch gives away weights that the forward of another gathered; set forwards_ahead to 0"
        )
