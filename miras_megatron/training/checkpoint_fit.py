"""Does a checkpoint belong to this run: the same configuration where it may not change, tokenizer and shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

from ..config.schema import Run, refused_on_resume
from .checkpoint import saved_run
from .job import Job
from .plain_files import Index


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
