"""A checkpoint as files alone, whose tensors are a word: for tests of folders and manifests."""

from __future__ import annotations

from pathlib import Path

from miras_megatron.training.checkpoint_folder import begin_checkpoint, complete_checkpoint
from miras_megatron.training.checkpoint_manifest import NEEDED, describe, write_manifest


def nothing() -> None:
    """The barrier of one rank."""


def save(run_dir: Path, step: int, content: str = "weights") -> Path:
    """A complete checkpoint of `step` whose files all hold `content`."""
    folder = begin_checkpoint(run_dir, step, 0, nothing)
    for name in ("data", "__0_0.distcp", *NEEDED):
        (folder / name).write_text(content)
    write_manifest(folder, step, {path.name: describe(path) for path in folder.iterdir()})
    return complete_checkpoint(run_dir, step, 0, nothing)
