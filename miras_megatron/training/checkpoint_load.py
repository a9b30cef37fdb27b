"""How a run goes on from a checkpoint bit for bit, and how another takes over its weights.

Nothing is loaded before every file was compared with the manifest, and the checkpoint found to fit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..parallel.together import gather_objects
from .checkpoint import COMMON, Progress
from .checkpoint_fit import refuse_other_run, refuse_other_tensors, refuse_other_tokenizer
from .checkpoint_manifest import damaged_files, refuse_damaged
from .engine_core import put_weights
from .job import Job
from .plain_files import Index, read_index, read_plain
from .rank_states import lane_templates, random_templates, restore_lanes, restore_random
from .tensor_files import read_tensors


def load_checkpoint(job: Job, folder: Path) -> Progress:
    """Put the job where the checkpoint in `folder` stands. A collective call.

    Raises ValueError naming file or field: a damaged file, another configuration, other shapes.
    """
    assert job.engine is not None
    index = _verified_index(job, folder)
    refuse_other_run(folder, job.run)
    wanted = job.engine.room_for_state()
    refuse_other_tensors(folder, index, wanted)
    stored = _load(folder, wanted | random_templates(job, index) | lane_templates(job, index))
    refuse_other_tokenizer(folder, stored["tokenizer"], job)
    job.engine.put_state(stored, stored["updates"])
    restore_random(job, stored)
    restore_lanes(job, stored)
    job.judge.remember(stored.get("recent", {}))
    if job.feed is not None:
        job.feed.seek(stored["data"])
    return Progress(stored["step"], stored["tokens"])


def load_weights(job: Job, folder: Path) -> Progress:
    """Only the weights of the checkpoint in `folder`, for a new run or for generation. A collective call.

    The optimizer's masters are set to them where the job has an optimizer.
    """
    index = _verified_index(job, folder)
    wanted = {"weights": job.model.sharded_state_dict() if job.engine is None else job.engine.weights()}
    refuse_other_tensors(folder, index, wanted)
    stored = _load(folder, wanted)
    refuse_other_tokenizer(folder, stored["tokenizer"], job)
    if job.engine is None:
        put_weights(job.model, stored["weights"])
    else:
        job.engine.put_weights(stored.get("weights", {}))
    return Progress(stored["step"], stored["tokens"])


def _verified_index(job: Job, folder: Path) -> Index:
    """The index, after every file was compared with the manifest; ranks share the reading and agree on the answer."""
    found = damaged_files(folder, job.mesh.rank, job.mesh.world_size)
    refuse_damaged(folder, [line for part in gather_objects(job.mesh, found) for line in part])
    return read_index(folder)


def _load(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """The tensors that `wanted` describes and the common state. Core reads common.pt too, so it is checked before."""
    common = read_plain(folder / "common.pt", COMMON)
    return read_tensors(wanted, folder) | common
