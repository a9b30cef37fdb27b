"""How dist_checkpointing's tensors reach the disk: planned and indexed by all ranks, written by each alone.

megatron-core's own torch_dist writer starts a manager process and forks one process a file from a process that has
threads; killed in the middle they stay behind. Here each rank writes its own file itself, in the same format, and may
do so in a thread while training goes on: nothing in `write` waits for another rank.
Newer cores also put the common state among the tensors as a pickled object: it is left out, `checkpoint` keeps it.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.dist_checkpointing.strategies import torch as core_strategies
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from ..parallel.shares import is_own
from .plain_files import as_the_system_says
from .signs import alive

Failure = BaseException | None

COPY_AHEAD = 10_000_000
"""bytes that are copied from a device while others are written: torch's own default"""


class _Writer(FileSystemWriter):
    """torch's writer, but the index doesn't name the folder it was written in, which is renamed anyway."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


class _Planner(MCoreSavePlanner):  # type: ignore[misc, unused-ignore]
    """core's planner; every tensor that goes to the disk is a sign of life: the main thread waits for the writing."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        alive()
        return super().resolve_data(write_item)


class TensorFiles:
    """The tensors of one checkpoint on their way to the disk, one file a rank: made, written, then indexed."""

    def __init__(self, tensors: dict[str, Any], folder: Path, *, on_cpu: bool = False) -> None:
        """Plan who writes what. A collective call; rank 0 keeps the plan of the whole.

        on_cpu  all tensors are: no stream of a device is touched, which a thread would take from device 0
        """
        self._index: Metadata | None = None
        self._written: list[WriteResult] = []
        self._ranks = _DistWrapper(None, True, 0)
        self._planner = _Planner(flatten_state_dict=False, dedup_replicated_tensors=False)
        ahead = 0 if on_cpu else COPY_AHEAD
        self._writer = _Writer(folder, single_file_per_rank=True, sync_files=True, per_thread_copy_ahead=ahead)
        self._plan = self._ranks.reduce_scatter("plan", lambda: self._own_plan(tensors), self._whole_plan)

    def write(self) -> None:
        """Write this rank's file, down to the disk. Raises what the disk raises."""
        with as_the_system_says():
            self._written = self._writer.write_data(self._planner.finish_plan(self._plan), self._planner).value()

    def finish(self, failure: Failure) -> None:
        """Write the index, rank 0 for all. A collective call.

        failure  what `write` raised here; CheckpointException tells it on every rank
        """

        def own() -> list[WriteResult]:
            if failure is not None:
                raise failure
            return self._written

        self._ranks.all_reduce("write", own, self._write_index)

    def _own_plan(self, tensors: dict[str, Any]) -> SavePlan:
        self._planner.set_up_planner(tensors, self._writer.storage_meta(), self._ranks.is_coordinator)
        self._writer.set_up_storage_writer(self._ranks.is_coordinator, rank=self._ranks.rank, use_collectives=True)
        return self._writer.prepare_local_plan(self._planner.create_local_plan())

    def _whole_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        plans, self._index = self._planner.create_global_plan(plans)
        return self._writer.prepare_global_plan(plans)

    def _write_index(self, results: list[list[WriteResult]]) -> None:
        assert self._index is not None, "rank 0 planned the whole"
        self._writer.finish(self._index, results)


class _ReadPlanner(MCoreLoadPlanner):  # type: ignore[misc, unused-ignore]
    """core's planner; every tensor that is read is a sign of life."""

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        alive()
        tensor: Tensor = super().resolve_tensor(read_item)
        return tensor


def read_tensors(wanted: dict[str, Any], folder: Path) -> dict[str, Any]:
    """dist_checkpointing.load of what `wanted` describes. A collective call."""
    with patch.object(core_strategies, "MCoreLoadPlanner", _ReadPlanner):
        read: dict[str, Any] = dist_checkpointing.load(wanted, str(folder), validate_access_integrity=False)
    return read


class PlannedSave(TorchDistSaveShardedStrategy):  # type: ignore[misc, unused-ignore]
    """What dist_checkpointing.save calls to write: plans only, and leaves the rest to `files`.

    copies  take the tensors as they are now, on the CPU: training may change its own before they are written
    """

    def __init__(self, *, copies: bool = False) -> None:
        super().__init__("torch_dist", 1, thread_count=1)
        self.copies = copies
        self.files: TensorFiles | None = None

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Plan the main replicas that this rank holds. A collective call."""
        grouped, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        tensors = {name: parts for name, parts in grouped.items() if not isinstance(parts[0], ShardedObject)}
        if self.copies:
            tensors = {name: [_copied(part) for part in parts] for name, parts in tensors.items()}
        self.files = TensorFiles(mcore_to_pyt_state_dict(tensors, False), Path(checkpoint_dir), on_cpu=self.copies)


def _copied(part: ShardedTensor) -> ShardedTensor:
    """The same part of the same tensor, with numbers of its own on the CPU; what was brought together has them."""
    if is_own(part.data):
        return part
    copied = copy.copy(part)
    copied.data = part.data.detach().to("cpu", copy=True)
    return copied
