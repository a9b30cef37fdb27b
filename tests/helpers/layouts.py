"""One model under any layout of ranks against the same model in one process, through megatron-core's schedule."""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
import torch.distributed as dist
from helpers.models import random_tokens, small_run
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from miras_megatron.compat.cpu import core_without_cuda
from miras_megatron.config.schema import Run
from miras_megatron.model.build import build_model
from miras_megatron.parallel.mesh import ParallelMesh
from miras_megatron.parallel.tensor import own_slice
from miras_megatron.training.batch import Batch, cut_for_rank
from miras_megatron.training.loss import summed_loss

DOCUMENTS: dict[str, Any] = {
    "one": lambda tokens, border: None,
    "on": lambda tokens, border: [0, border, tokens],
    "before": lambda tokens, border: [0, border - 1, tokens],
    "after": lambda tokens, border: [0, border + 1, tokens],
    "far": lambda tokens, border: [0, border // 2, border // 2 + 1, tokens - 2, tokens],
}
"""Where documents start, seen from a border between ranks; the second row always has other documents."""


def batches_of(tokens: int, border: int, documents: str, one_target: bool, count: int) -> list[Batch]:
    """`count` microbatches of two rows; with `one_target` a single token of each row has a loss."""
    found = []
    for number in range(count):
        rows = random_tokens(2, tokens + 1, seed=number)
        place = torch.arange(tokens)
        mask = (place == tokens - 2 if one_target else place % 5 > 0).float().expand(2, -1).contiguous()
        starts = DOCUMENTS[documents](tokens, border)
        borders = None if starts is None else [torch.tensor(starts), torch.tensor([0, tokens // 3, tokens])]
        nothing = torch.zeros(2, dtype=torch.int64)
        found.append(Batch(rows[:, :-1], rows[:, 1:], mask, borders, nothing == 0, nothing, nothing))
    return found


def run_step(run: Run, mesh: ParallelMesh, batches: list[Batch]) -> tuple[float, dict[str, Tensor], Any]:
    """Sum of losses over all ranks, gradients by the names of the whole model, and the model; float64."""
    model = build_model(run, mesh).double()
    model.config.pipeline_dtype = torch.float64
    relay, sums = model.relay, []

    def forward(source: Any, model: Any) -> Any:
        batch = next(source)
        out = model(batch.tokens, labels=batch.labels, cu_seqlens=batch.cu_seqlens, row_tokens=batch.row_tokens)

        def report(losses: Tensor) -> Any:
            total, count = summed_loss(losses, batch.loss_mask)
            sums.append(total.detach())
            return total, count, {}

        return out, report

    if relay is not None:
        batches = [cut_for_rank(b, relay.cut(b.tokens.shape[1]), mesh.context_rank) for b in batches]
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=batches[0].row_tokens,
        micro_batch_size=2,
        forward_only=False,
    )
    mesh.ring.finish()
    loss = torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64)
    dist.all_reduce(loss, group=mesh.groups.cp)
    return float(loss), _gradients(model, run, mesh), model


def _gradients(model: Any, run: Run, mesh: ParallelMesh) -> dict[str, Tensor]:
    found = {}
    first = mesh.pipeline_rank * run.model.layers // mesh.pipeline
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(gradient, group=mesh.groups.cp)
        if mesh.tensor > 1 and run.parallel.sequence and getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(gradient, group=mesh.groups.tp)
        found[_global_name(name, first)] = (gradient, parameter)
    return found


def _global_name(name: str, first: int) -> str:
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(int(parts[2]) + first)
    return ".".join(parts)


@functools.lru_cache(maxsize=64)
def alone(pattern: str, changes: str, tokens: int, border: int, documents: str, one_target: bool, count: int) -> Any:
    """Loss, gradients and weights of one process; kept, since many layouts are compared with it."""
    with core_without_cuda(), ParallelMesh(device="cpu") as mesh:
        mesh.seed(5)
        run = small_run(pattern, **json.loads(changes))
        batches = batches_of(tokens, border, documents, one_target, count)
        losses = [run_step(run, _Alone(mesh), [batch]) for batch in batches]
        gradients: dict[str, Tensor] = {}
        for _, found, _ in losses:
            for name, (gradient, _) in found.items():
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
        weights = {name: p.detach() for name, p in losses[0][2].named_parameters()}
        return sum(loss for loss, _, _ in losses), gradients, weights


class _Alone:
    """A mesh of this process alone: other ranks of the world do the same beside it."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mesh, name)


def compare_layout(
    pattern: str,
    changes: dict[str, Any],
    layout: dict[str, Any],
    tokens: int,
    documents: str = "one",
    one_target: bool = False,
    count: int = 1,
) -> dict[str, float]:
    """On every rank: the largest difference of the loss and of each gradient from one process, relative to its size."""
    ranks = layout.get("context", 1)
    border = tokens // ranks if ranks > 1 else tokens // max(layout.get("pieces", 1), 2)
    loss, gradients, weights = alone(pattern, json.dumps(changes), tokens, border, documents, one_target, count)
    run = small_run(pattern, **changes, **layout)
    with core_without_cuda(), ParallelMesh(run.parallel, device="cpu") as mesh:
        mesh.seed(5)
        got, found, _ = run_step(run, mesh, batches_of(tokens, border, documents, one_target, count))
        differences = {"loss": abs(got - loss) / abs(loss) if mesh.is_last_stage else 0.0}
        for name, (gradient, parameter) in found.items():
            dim, stride = getattr(parameter, "partition_dim", -1), getattr(parameter, "partition_stride", 1)

            def mine(full: Tensor, dim: int = dim, stride: int = stride) -> Tensor:
                return own_slice(full, dim if dim >= 0 else None, mesh.tensor, mesh.tensor_rank, stride)

            assert torch.equal(parameter, mine(weights[name])), f"{name} starts differently"
            scale = gradients[name].abs().max().clamp(min=1e-6)
            differences[name] = float((gradient - mine(gradients[name])).abs().max() / scale)
        stages = [set(found)] * mesh.pipeline
        if mesh.pipeline > 1:
            dist.all_gather_object(stages, set(found), group=mesh.groups.pp)
        assert set().union(*stages) >= set(gradients), "parameters that no stage has"
    return differences
