"""A run folder with one checkpoint, written without a process group: what imports from other formats end in."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch import Tensor

from miras_megatron.config.describe import dump_run
from miras_megatron.config.schema import Run
from miras_megatron.training.atomic_write import write_atomically
from miras_megatron.training.checkpoint_folder import LATEST, folder_of, name_of
from miras_megatron.training.checkpoint_manifest import describe, write_manifest
from miras_megatron.training.plain_files import write_plain
from miras_megatron.training.stored_tensors import write_tensors


def write_run(made: Path, run: Run, common: dict[str, Any], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Fill the folder `made`: the checkpoint as `checkpoint_save.Saving` leaves it, and the configuration beside it.

    common  names of checkpoint.COMMON -> values; no lane carries a state. Raises OSError where the disk is full.
    """
    folder = folder_of(made) / name_of(common["step"])
    folder.mkdir(parents=True)
    write_tensors(folder, tensors)
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))
    write_plain(folder / "common.pt", common | {"lanes": [], "lane_layouts": {}})
    write_atomically(folder / "config.yaml", dump_run(run))
    write_manifest(folder, common["step"], {path.name: describe(path) for path in folder.iterdir()})
    write_atomically(folder_of(made) / LATEST, folder.name + "\n")
    write_atomically(made / "config.yaml", dump_run(run))
