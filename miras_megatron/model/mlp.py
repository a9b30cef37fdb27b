"""The SwiGLU MLP of every layer: megatron-core's, in the form in which its layers of all versions build one."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules


class SwiGLU(MLP):  # type: ignore[misc, unused-ignore]
    """[s, b, h] -> [s, b, h]: W_2 (silu(W_g x) * W_1 x), split over tensor-parallel ranks, of config.ffn_hidden_size.

    A class of its own, since core 0.16 passes a plain class the configuration only and core 0.19 more.
    """

    def __init__(self, config: Any, pg_collection: Any = None, is_mtp_layer: bool = False, name: str | None = None):
        super().__init__(
            config,
            MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
            ffn_hidden_size=config.ffn_hidden_size,
            tp_group=None if pg_collection is None else pg_collection.tp,
        )
