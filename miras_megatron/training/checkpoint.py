"""What a checkpoint holds.

Sharded, by megatron-core's dist_checkpointing: weights, AdamW's moments and fp32 masters, under the names that any
layout of ranks understands; and, a rank or a lane each, random states and carried memory states.
Common (`COMMON`): plain values. Hyperparameters aren't stored: they come from the configuration and the step.
`checkpoint_save` writes one, `checkpoint_load` reads it, `checkpoint_fit` says whether it fits a run. Files and
atomicity are `checkpoint_folder`'s, what may be unpickled is `plain_files`'.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.load import load_file
from ..config.schema import Run
from ..parallel.together import gather_objects
from .carried import pack_states
from .checkpoint_manifest import refuse_damaged
from .job import Job
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
