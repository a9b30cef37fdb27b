"""What a checkpoint holds.

Sharded, by megatron-core's dist_checkpointing: weights, AdamW's moments and fp32 masters, under the names that any
layout of ranks understands; and, a rank or a lane each, random states and carried memory states.
Common (`COMMON`): plain values. Hyperparameters aren't stored: they come from the configuration and the step.
`checkpoint_save` writes one, `checkpoint_load` reads it. Files and atomicity are `checkpoint_folder`'s, what may be
unpickled is `plain_files`'.
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
from .checkpoint_manifest import refuse_damaged
from .job import Job
from .plain_files import Index
from .rank_states import shard

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


def _tensors(parts: Any) -> list[ShardedTensor]:
    if isinstance(parts, ShardedTensor):
        return [parts]
    if isinstance(parts, ShardedTensorFactory):
        return _tensors(parts.build())
    values = parts.values() if isinstance(parts, dict) else parts if isinstance(parts, list) else ()
    return [tensor for value in values for tensor in _tensors(value)]
