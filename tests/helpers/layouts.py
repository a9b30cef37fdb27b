"""One model under any layout of ranks against the same model in one process, through megatron-core's schedule."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from helpers.models import random_tokens, small_run
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from miras_megatron.compat.cpu import core_without_cuda
from miras_megatron.config.schema import Parallel, Run
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


def run_step(run: Run, mesh: ParallelMesh, batches: list[Batch], exact: bool) -> tuple[float, dict[str, Any]]:
    """Sum of losses over all ranks, and (gradient, parameter) by the names of the whole model.

    exact  in float64, from the weights as the run's precision has them; else in that precision
    """
    model = build_model(run, mesh)
    if exact:
        model = model.double()
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
    batches = [batch.to(mesh.device) for batch in batches]
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
    loss = torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64, device=mesh.device)
    dist.all_reduce(loss, group=mesh.groups.cp)
    return float(loss), _gradients(model, run, mesh)


def _gradients(model: Any, run: Run, mesh: ParallelMesh) -> dict[str, Any]:
    found = {}
    first = mesh.pipeline_rank * run.model.layers // mesh.pipeline
    ends = run.model.tie_embeddings and mesh.pipeline > 1 and (mesh.is_first_stage or mesh.is_last_stage)
    tied = model.shared_embedding_or_output_weight() if ends else None
    for name, parameter in model.named_parameters():
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradient = own.to(torch.float64, copy=True)
        dist.all_reduce(gradient, group=mesh.groups.cp)
        if parameter is tied:
            dist.all_reduce(gradient, group=mesh.groups.embd)
        if mesh.tensor > 1 and run.parallel.sequence and getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(gradient, group=mesh.groups.tp)
        found[TIED if parameter is tied else _global_name(name, first)] = (gradient.cpu(), parameter)
    return found


TIED = "embedding.word_embeddings.weight"
"""What one process calls the weight of which two stages have a copy."""


def _global_name(name: str, first: int) -> str:
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(int(parts[2]) + first)
    return ".".join(parts)


@dataclass(frozen=True)
class Case:
    """A model, its data and how ranks share it.

    changes, layout  fields of `small_run`
    documents        a name of DOCUMENTS
    one_target       a single token of each row has a loss
    count            microbatches
    exact            in float64; else in the precision of `changes`
    """

    pattern: str
    changes: dict[str, Any]
    layout: dict[str, Any]
    tokens: int
    documents: str = "one"
    one_target: bool = False
    count: int = 1
    exact: bool = True

    @property
    def ranks(self) -> int:
        """Ranks of one replica."""
        return math.prod(self.layout.get(axis, 1) for axis in ("tensor", "pipeline", "context"))

    def batches(self) -> list[Batch]:
        """The data, documents placed by a border between ranks, or between pieces of one."""
        parts = max(self.layout.get("context", 1), 1 + (self.layout.get("context", 1) == 1))
        return batches_of(self.tokens, self.tokens // parts, self.documents, self.one_target, self.count)


@dataclass(frozen=True)
class Reference:
    """What one process finds: the sum of all losses, gradients and weights by name."""

    loss: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def reference(case: Case) -> Reference:
    """One process; kept, since many layouts are compared with it."""
    parts = max(case.layout.get("context", 1), 2)
    key = (case.pattern, json.dumps(case.changes), case.tokens, parts, case.documents, case.one_target, case.count)
    key += (case.exact,)
    if key not in _REFERENCES:
        _REFERENCES[key] = _alone(case)
    return _REFERENCES[key]


_REFERENCES: dict[Any, Reference] = {}


def _alone(case: Case) -> Reference:
    with core_without_cuda(), ParallelMesh(device="cpu") as mesh:
        mesh.seed(5)
        loss, found = run_step(small_run(case.pattern, **case.changes), mesh, case.batches(), case.exact)
    return Reference(
        loss,
        {name: gradient for name, (gradient, _) in found.items()},
        {name: parameter.detach() for name, (_, parameter) in found.items()},
    )


def compare_layout(case: Case, expected: Reference) -> dict[str, float]:
    """On a rank: how far the loss and each gradient are from one process's, relative to its size (`apart`)."""
    run = small_run(case.pattern, **case.changes, **case.layout)
    with core_without_cuda():
        mesh = held_mesh(run.parallel)
        mesh.seed(5)
        loss, found = run_step(run, mesh, case.batches(), case.exact)
    differences = {"loss": abs(loss - expected.loss) / abs(expected.loss) if mesh.is_last_stage else 0.0}
    for name, (gradient, parameter) in found.items():
        dim, stride = getattr(parameter, "partition_dim", -1), getattr(parameter, "partition_stride", 1)
        mine = partial(
            own_slice,
            split_dim=dim if dim >= 0 else None,
            shards=mesh.tensor,
            index=mesh.tensor_rank,
            stride=stride,
        )
        assert torch.equal(parameter.cpu(), mine(expected.weights[name])), f"{name} starts differently"
        whole = expected.gradients[name]
        differences[name] = apart(gradient, mine(whole), whole, case.exact)
    stages: list[Any] = [set(found)] * mesh.pipeline
    dist.all_gather_object(stages, set(found), group=mesh.groups.pp)
    assert set().union(*stages) == set(expected.gradients), "parameters that no stage has, or one too many"
    return differences


def apart(found: Tensor, expected: Tensor, whole: Tensor, exact: bool) -> float:
    """The largest difference over the largest number of `whole`; else of the norms, where roundings average out."""
    if exact:
        return float((found - expected).abs().max() / whole.abs().max().clamp(min=1e-6))
    return float((found - expected).norm() / whole.norm().clamp(min=1e-6))


_HELD: list[tuple[Parallel, ParallelMesh]] = []


def held_mesh(parallel: Parallel) -> ParallelMesh:
    """A mesh that stays for the next case of the same sizes: making all its groups takes longer than a case."""
    sizes = Parallel(tensor=parallel.tensor, pipeline=parallel.pipeline, context=parallel.context)
    if _HELD and _HELD[0][0] == sizes:
        return _HELD[0][1]
    release_mesh()
    _HELD.append((sizes, ParallelMesh(sizes, device="cuda" if dist.get_backend() == "nccl" else "cpu")))
    return _HELD[0][1]


def release_mesh() -> None:
    """Let go of the mesh that is held, so that others may make theirs."""
    while _HELD:
        _HELD.pop()[1].destroy()
