"""How dist_checkpointing's tensors reach the disk: written in this process, tensors only.

megatron-core's own torch_dist writer starts a manager process and forks one process a file from a process that has
threads; killed in the middle they stay behind. Here each rank writes its own file itself, in the same format.
Newer cores also put the common state among the tensors as a pickled object: it is left out, `checkpoint` keeps it.
"""

from __future__ import annotations

from pathlib import Path

from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors


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
        grouped, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        tensors = {name: parts for name, parts in grouped.items() if not isinstance(parts[0], ShardedObject)}
        save_tensors(
            mcore_to_pyt_state_dict(tensors, False),
            storage_writer=_Writer(checkpoint_dir, single_file_per_rank=True, sync_files=True),
            planner=MCoreSavePlanner(flatten_state_dict=False, dedup_replicated_tensors=False),
        )
