"""What a checkpoint holds, and how a run goes on from one bit for bit.

Sharded, by megatron-core's dist_checkpointing: weights, AdamW's moments and fp32 masters, under the names that any
layout of ranks understands; and, a rank or a lane each, random states and carried memory states.
Common (`COMMON`): plain values. Hyperparameters aren't stored: they come from the configuration and the step.
`checkpoint_save` writes one. Files and atomicity are `checkpoint_folder`'s, what may be unpickled is `plain_files`'.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

from ..config.load import load_file
from ..config.schema import Run, refused_on_resume
from ..parallel.together import gather_objects
from .carried import pack_states
from .checkpoint_manifest import damaged_files, refuse_damaged
from .engine_core import put_weights
from .job import Job
from .plain_files import Index, read_index, read_plain
from .rank_states import lane_templates, random_templates, restore_lanes, restore_random, shard
from .tensor_files import read_tensors

COMMON = ("step", "tokens", "updates", "tokenizer", "data", "lanes", "lane_layouts", "recent")
"""Names in common.pt."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands: optimizer steps done and tokens read. The data position follows from the step."""

    step: int = 0
    tokens: int = 0


def common_state(job: Job, progress: Progress) -> dict[str, Any]:
    """The values under the names of `COMMON`. A collective call."""
    assert job.engine is not None
    layouts = {shard(job): pack_states(state)[0] for state in list(job.carried.lanes.values())[:1]}
    gathered: dict[str, str] = {}
    for part in gather_objects(job.mesh, layouts):
        gathered |= part
    lanes = sorted({lane for part in gather_objects(job.mesh, sorted(job.carried.lanes)) for lane in part})
    return {
        "step": progress.step,
        "tokens": progress.tokens,
        "updates": job.engine.updates(),
        "tokenizer": job.tokenizer.digest,
        "data": job.feed.position() if job.feed is not None else {},
        "lanes": lanes,
        "lane_layouts": gathered,
        "recent": job.judge.recent(),
    }


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


def saved_run(folder: Path) -> Run:
    """The configuration a checkpoint was written under. Raises ValueError naming the file."""
    if not (folder / "config.yaml").is_file():
        refuse_damaged(folder, [f"{folder / 'config.yaml'} is missing"])
    return load_file(folder / "config.yaml")


def refuse_other_run(folder: Path, run: Run) -> None:
    """Raise ValueError where a field that may not change on resume differs, naming each with both values."""
    differing = refused_on_resume(saved_run(folder), run)
    if differing:
        lines = [f"  {name}: the checkpoint has {was!r}, this run {now!r}" for name, (was, now) in differing.items()]
        raise ValueError(
            f"{folder} was written under another configuration; {len(differing)} field(s) differ that may not:\n"
            + "\n".join(lines)
            + "\n  put them back, or start a new run in another run.dir (--init-from takes over the weights)"
        )


def refuse_other_tokenizer(folder: Path, digest: str, job: Job) -> None:
    """Raise ValueError where the checkpoint's weights belong to the ids of another tokenizer."""
    if digest != job.tokenizer.digest:
        raise ValueError(
            f"data.tokenizer = {job.run.data.tokenizer!r}: {folder} was trained with another tokenizer "
            f"(digest {digest[:12]}, this one {job.tokenizer.digest[:12]}); name the tokenizer it was trained with"
        )


def refuse_other_tensors(folder: Path, index: Index, wanted: dict[str, Any]) -> None:
    """Raise ValueError where the checkpoint lacks a tensor, or has it in another shape."""
    problems = []
    for tensor in _tensors(wanted):
        entry = index.get(tensor.key)
        if entry is None:
            problems.append(f"  {tensor.key}: not in the checkpoint")
        elif tuple(entry.size) != tuple(tensor.global_shape):
            problems.append(
                f"  {tensor.key}: {list(entry.size)} in the checkpoint, {list(tensor.global_shape)} in this run"
            )
    if problems:
        more = f"\n  and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(
            f"{folder} doesn't fit this model:\n" + "\n".join(problems[:5]) + more + "\n  use its config.yaml"
        )


def _verified_index(job: Job, folder: Path) -> Index:
    """The index, after every file was compared with the manifest; ranks share the reading and agree on the answer."""
    found = damaged_files(folder, job.mesh.rank, job.mesh.world_size)
    refuse_damaged(folder, [line for part in gather_objects(job.mesh, found) for line in part])
    return read_index(folder)


def _load(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """The tensors that `wanted` describes and the common state. Core reads common.pt too, so it is checked before."""
    common = read_plain(folder / "common.pt", COMMON)
    return read_tensors(wanted, folder) | common


def _tensors(parts: Any) -> list[ShardedTensor]:
    if isinstance(parts, ShardedTensor):
        return [parts]
    if isinstance(parts, ShardedTensorFactory):
        return _tensors(parts.build())
    values = parts.values() if isinstance(parts, dict) else parts if isinstance(parts, list) else ()
    return [tensor for value in values for tensor in _tensors(value)]
