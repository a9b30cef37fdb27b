"""Are two runs the same, to the last bit: every step's loss and gradient norm, every tensor of every checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from miras_megatron.training.checkpoint_folder import complete_checkpoints
from miras_megatron.training.checkpoint_manifest import damaged_files
from miras_megatron.training.plain_files import read_index

from .tiny_run import learned


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, by name."""
    index = read_index(folder)
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in index.items()}
    load(tensors, storage_reader=FileSystemReader(folder), no_dist=True)
    return tensors


def assert_same_run(one: Path, other: Path, *, last_only: bool = False) -> None:
    """Records and checkpoints are equal; `last_only`: of the checkpoints only the newest is there in both."""
    assert learned(one) == learned(other)
    first, second = complete_checkpoints(one), complete_checkpoints(other)
    if last_only:
        first, second = first[-1:], second[-1:]
    assert [path.name for path in first] == [path.name for path in second] != []
    for a, b in zip(first, second, strict=True):
        assert damaged_files(b) == []
        left, right = tensors_of(a), tensors_of(b)
        assert left.keys() == right.keys()
        assert [name for name, x in left.items() if not torch.equal(x, right[name])] == []
