"""The l2 norm of every parameter's gradient, under names that hang on no layout of ranks.

What `miras-compare` names when two runs part: the whole norm says that they did, these say where.
"""

from __future__ import annotations

import math

import torch
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from ..parallel.together import gather_objects
from .guard import Finding, all_finite
from .job import Job


def gradient_norms(job: Job) -> dict[str, float]:
    """Checkpoint's name of a weight -> l2 norm of its whole gradient, on every rank. A collective call.

    Call it after gradients are summed over ranks and before they are clipped. Accumulated in float64.
    """
    total: dict[str, float] = {}
    for part in gather_objects(job.mesh, _own_squares(job)):
        for name, square in part.items():
            total[name] = total.get(name, 0.0) + square
    return {name: math.sqrt(square) for name, square in total.items()}


def find_bad_gradient(job: Job) -> Finding:
    """The last weight whose summed gradient isn't finite in this rank's part, wherever the engine keeps it."""
    assert job.engine is not None, "gradients are looked at in a training step"
    bad = [sharded.key for sharded, gradient in job.engine.own_gradients() if not all_finite(gradient)]
    if not bad:
        return Finding()
    place, _, parameter = bad[-1].rpartition(".")
    return Finding(place, f"the gradient of parameter {parameter}", [f"{len(bad)} gradients are not finite"])


@torch.no_grad()
def _own_squares(job: Job) -> dict[str, float]:
    """Name -> sum of squares of what this rank adds to each gradient.

    As in core's gradient norm, a weight that several ranks hold alike counts on the first tensor-parallel rank, and
    one that two stages share on the first of them.
    """
    assert job.engine is not None, "gradients are looked at in a training step"
    norms = {}
    for sharded, gradient in job.engine.own_gradients():
        alone = param_is_not_tensor_parallel_duplicate(sharded.data, job.mesh.groups.tp)
        if alone and param_is_not_shared(sharded.data):
            norms[sharded.key] = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    squares = torch.stack(list(norms.values())).square().tolist() if norms else []
    return dict(zip(norms, squares, strict=True))
