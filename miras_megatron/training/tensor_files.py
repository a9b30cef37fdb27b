"""How dist_checkpointing's tensors reach and leave the disk: written in this process, read through an allow-list.

megatron-core's own torch_dist writer starts a manager process and forks one process a file from a process that
has threads; killed in the middle they stay behind. Here each rank writes its own file itself. Its own reader of
`common.pt` leaves what may be unpickled to torch's default and to an environment variable; here it is a list.
The files are the same torch_dist format either way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedStateDict, StateDict
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME, TorchCommonLoadStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from .checkpoint_folder import read_plain


class _Writer(FileSystemWriter):
    """torch's writer, but the index doesn't name the folder it was written in, which is renamed anyway."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


class InProcessSave(TorchDistSaveShardedStrategy):  # type: ignore[misc, unused-ignore]
    """The torch_dist format, written by this process, one file a rank, synced to the disk."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Write the main replicas that this rank holds. A collective call."""
        tensors, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        save_tensors(
            mcore_to_pyt_state_dict(tensors, False),
            storage_writer=_Writer(checkpoint_dir, single_file_per_rank=True, sync_files=True),
            planner=MCoreSavePlanner(flatten_state_dict=False, dedup_replicated_tensors=False),
        )


class PlainCommon(TorchCommonLoadStrategy):  # type: ignore[misc, unused-ignore]
    """Reads `common.pt` as tensors and plain values with the given names, and nothing else."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self.allowed = allowed

    def load_common(self, checkpoint_dir: str | Path) -> StateDict:
        """The common state. Raises ValueError where the file holds anything else."""
        return read_plain(Path(checkpoint_dir) / COMMON_STATE_FNAME, self.allowed)

    def load_sharded_objects(self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> Any:
        """Refused: pickled objects are never written here."""
        raise ValueError(f"{checkpoint_dir}: holds pickled objects; only tensors are read")
