"""This mesh's process groups by the names that DeepSpeed asks for."""

from __future__ import annotations

from typing import Any

from .mesh import ParallelMesh


class Groups:
    """The process groups by the names that DeepSpeed asks for; megatron's parallel_state has lost half of them.

    Its data-parallel group is data x context: ranks that share a sequence hold the same weights. Its model-parallel
    group is tensor x pipeline.
    """

    def __init__(self, mesh: ParallelMesh):
        self._data, self._model, self._tensor, self._pipe = (
            mesh.groups.dp_cp,
            mesh.groups.mp,
            mesh.groups.tp,
            mesh.groups.pp,
        )

    def get_data_parallel_group(self) -> Any:
        return self._data

    def get_data_parallel_world_size(self) -> int:
        return int(self._data.size())

    def get_data_parallel_rank(self) -> int:
        return int(self._data.rank())

    def get_model_parallel_group(self) -> Any:
        return self._model

    def get_model_parallel_world_size(self) -> int:
        return int(self._model.size())

    def get_model_parallel_rank(self) -> int:
        return int(self._model.rank())

    def get_tensor_model_parallel_group(self) -> Any:
        return self._tensor

    def get_tensor_model_parallel_world_size(self) -> int:
        return int(self._tensor.size())

    def get_tensor_model_parallel_rank(self) -> int:
        return int(self._tensor.rank())

    def get_pipeline_model_parallel_group(self) -> Any:
        return self._pipe

    def get_pipeline_model_parallel_world_size(self) -> int:
        return int(self._pipe.size())

    def get_pipeline_model_parallel_rank(self) -> int:
        return int(self._pipe.rank())
