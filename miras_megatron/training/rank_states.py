"""What of a checkpoint is of one rank or lane alone: random states, and memory states carried over steps."""

from __future__ import annotations

import logging
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor

from .carried import pack_states, unpack_states
from .job import Job
from .plain_files import Index

logger = logging.getLogger(__name__)


def random_tensors(job: Job) -> dict[str, Any]:
    """This rank's random states, to be written."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    keys = {name: f"random.rank{job.mesh.rank}.{name}" for name in states}
    return {"random": {name: ShardedTensor.from_rank_offsets(keys[name], x) for name, x in states.items()}}


def random_templates(job: Job, index: Index) -> dict[str, Any]:
    """This rank's random states, where the checkpoint was written by as many ranks as there are now."""
    prefix = f"random.rank{job.mesh.rank}."
    names = [key for key in index if key.startswith("random.rank")]
    ranks = {key.split(".")[1] for key in names}
    if len(ranks) != job.mesh.world_size:
        logger.warning("written by %d ranks, resumed by %d: random states start anew", len(ranks), job.mesh.world_size)
        return {}
    return {"random": {key[len(prefix) :]: _template(index, key) for key in names if key.startswith(prefix)}}


def restore_random(job: Job, stored: dict[str, Any]) -> None:
    """Go on from what was read into `random_templates`."""
    random = stored.get("random", {})
    if "cpu" in random:
        torch.set_rng_state(random["cpu"].cpu())
    if "cuda" in random and torch.cuda.is_available():
        torch.cuda.set_rng_state(random["cuda"].cpu())


def shard(job: Job) -> str:
    """Which part of every lane's state this rank holds."""
    return f"t{job.mesh.tensor_rank}p{job.mesh.pipeline_rank}"


def lane_tensors(job: Job) -> dict[str, Any]:
    """The states of the lanes that this rank carries, to be written."""
    tensors = {}
    for lane, state in job.carried.lanes.items():
        for name, tensor in pack_states(state)[1].items():
            key = f"lane{lane}.{shard(job)}.{name}"
            tensors[key] = ShardedTensor.from_rank_offsets(key, tensor.contiguous())
    return {"lane_states": tensors} if tensors else {}


def lane_templates(job: Job, index: Index) -> dict[str, Any]:
    """The states of the lanes this rank reads, whichever rank wrote them; its own part of the heads and layers."""
    names = [key for key in index if key.startswith("lane")]
    own = {f"lane{lane}.{shard(job)}" for lane in _own_lanes(job)}
    mine = {key: _template(index, key) for key in names if key.rpartition(".")[0] in own}
    shards = {key.split(".")[1] for key in names}
    if names and shards != {f"t{t}p{p}" for t in range(job.mesh.tensor) for p in range(job.mesh.pipeline)}:
        raise ValueError(
            'data.packing = "ordered": carried states were saved under another parallel.tensor or parallel.pipeline; '
            "resume with those, or start a new run with --init-from"
        )
    return {"lane_states": mine} if mine else {}


def _own_lanes(job: Job) -> list[int]:
    """The lanes that this data-parallel rank reads."""
    rows, mesh = job.run.training.micro_batch, job.mesh
    numbers = range(job.run.micro_batches(mesh.world_size))
    return [(n * mesh.data + mesh.data_rank) * rows + row for n in numbers for row in range(rows)]


def restore_lanes(job: Job, stored: dict[str, Any]) -> None:
    """Go on from what was read into `lane_templates`."""
    job.carried.lanes = {}
    for lane in sorted(set(stored["lanes"]) & set(_own_lanes(job))):
        prefix = f"lane{lane}.{shard(job)}."
        tensors = {k[len(prefix) :]: v for k, v in stored["lane_states"].items() if k.startswith(prefix)}
        job.carried.lanes[lane] = unpack_states(stored["lane_layouts"][shard(job)], tensors)


def _template(index: Index, key: str) -> ShardedTensor:
    """An unsharded tensor to read `key` into; every rank may read it."""
    entry = index[key]
    return ShardedTensor.from_rank_offsets(key, torch.empty(entry.size, dtype=entry.properties.dtype))
