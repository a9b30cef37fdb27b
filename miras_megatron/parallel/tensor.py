"""How the heads of a layer are shared by tensor-parallel ranks: projections, gathers, and what a checkpoint says of it.

`MegatronLinearFactory` is the layers' LinearFactory over megatron-core's Column- and RowParallelLinear.
Column outputs are packed per head ([q | k | v] of one head together), so that an equal slice is whole heads.
Full weights are drawn from one generator and then cut: one and two ranks make the same model.

Inside a block every value is split by heads or the same on all ranks, and the gradient of the latter is
whole on every rank: a column projection sums its input's gradient over ranks itself.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn.functional import linear

from miras_megatron.layers.linear import Split

SPLIT_DIMS: dict[Split, int | None] = {"column": 0, "row": 1, "replicated": None}
"""The dim of a weight [out, in] along which ranks share it."""


class MegatronLinearFactory:
    """Makes the projections of one layer for the ranks of `groups.tp`.

    config      megatron's TransformerConfig; weights have its params_dtype
    generator   the weights are drawn from it in float32, in the order of the calls
    """

    def __init__(self, config: Any, groups: Any, generator: torch.Generator | None = None):
        self.shards: int = groups.tp.size()
        self.index: int = groups.tp.rank()
        self.generator = generator
        self._group = groups.tp
        # Sequence parallelism ends at the block's door, which gathers once for all projections.
        self._config = copy.copy(config)
        self._config.sequence_parallel = False

    def make(self, in_features: int, out_features: int, *, split: Split, std: float) -> nn.Module:
        """A projection without bias, [B, T, in] -> [B, T, out], its weight normal with deviation `std`.

        The sizes are those over all ranks; see LinearFactory for what each split takes and gives.
        """
        made: nn.Module
        if split == "column":
            made = ColumnLinear(in_features, out_features, self._config, self._group)
        elif split == "row":
            made = RowLinear(in_features, out_features, self._config, self._group)
        else:
            made = ReplicatedLinear(in_features, out_features, self._config)
        full = torch.empty(out_features, in_features).normal_(0.0, std, generator=self.generator)
        weight: Any = made.weight
        weight.split_dim = SPLIT_DIMS[split]
        with torch.no_grad():
            weight.copy_(own_slice(full, weight.split_dim, self.shards, self.index))
        return made

    def gather(self, x: Tensor) -> Tensor:
        """[..., this rank's columns] -> [..., all columns], rank after rank; backward keeps this rank's part."""
        return gather_columns(x, self._group)


class ColumnLinear(ColumnParallelLinear):  # type: ignore[misc, unused-ignore]
    """megatron's column-parallel projection as a layer wants it: one tensor in, one out, in the weight's dtype."""

    def __init__(self, in_features: int, out_features: int, config: Any, group: Any):
        super().__init__(
            in_features,
            out_features,
            config=config,
            init_method=nn.init.zeros_,
            bias=False,
            gather_output=False,
            tp_group=group,
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x.to(self.weight.dtype))[0]
        return out


class RowLinear(RowParallelLinear):  # type: ignore[misc, unused-ignore]
    """megatron's row-parallel projection as a layer wants it; the sum over ranks is in the weight's dtype."""

    def __init__(self, in_features: int, out_features: int, config: Any, group: Any):
        super().__init__(
            in_features,
            out_features,
            config=config,
            init_method=nn.init.zeros_,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=group,
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x.to(self.weight.dtype))[0]
        return out


class ReplicatedLinear(nn.Module):
    """The same projection on every rank."""

    def __init__(self, in_features: int, out_features: int, config: Any):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x.to(self.weight.dtype), self.weight)


def gather_columns(x: Tensor, group: Any) -> Tensor:
    """[..., this rank's columns] -> [..., all columns], rank after rank; backward keeps this rank's part."""
    apply: Any = GatherColumns.apply
    gathered: Tensor = apply(x, group) if group.size() > 1 else x
    return gathered


class GatherColumns(torch.autograd.Function):
    """All ranks' columns, side by side.

    forward    rank i sends x_i to all: [x_0 | x_1 | ..]
    backward   nobody sends: the gradient is the same on all ranks, rank i keeps columns i
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.group.size(), dim=-1)[ctx.group.rank()].contiguous(), None


def own_slice(full: Tensor, split_dim: int | None, shards: int, index: int, stride: int = 1) -> Tensor:
    """Rank `index`'s part of a full tensor; with `stride` 2 (SwiGLU) a part of each half, one after the other."""
    if split_dim is None:
        return full
    return torch.cat(full.chunk(shards * stride, dim=split_dim)[index::shards], dim=split_dim)


def mark_splits(module: nn.Module) -> None:
    """Tell megatron-core, in its own attributes, which parameters are parts; its gradient norm counts others once."""
    for parameter in module.parameters():
        split_dim = getattr(parameter, "split_dim", None)
        parameter.tensor_model_parallel = split_dim is not None  # type: ignore[attr-defined]
        parameter.partition_dim = -1 if split_dim is None else split_dim  # type: ignore[attr-defined]
        parameter.partition_stride = 1  # type: ignore[attr-defined]


def sharded_parameters(
    module: nn.Module, prefix: str, offsets: tuple[Any, ...], metadata: dict[str, Any] | None, group: Any
) -> dict[str, Any]:
    """Name -> ShardedTensor for every parameter and buffer of `module`, split as `split_dim` says.

    The checkpoint holds whole tensors, so it can be read at any number of ranks.
    """
    metadata = ensure_metadata_has_dp_cp_group(metadata)
    tensors = {name: x for name, x in module.state_dict(keep_vars=True).items() if isinstance(x, Tensor)}
    axes = {name: dim for name, x in tensors.items() if (dim := getattr(x, "split_dim", None)) is not None}
    sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
        tensors, prefix, axes, offsets, tp_group=group, dp_cp_group=metadata["dp_cp_group"]
    )
    return sharded


def without_objects(sharded: dict[str, Any]) -> dict[str, Any]:
    """Only the tensors of a sharded state: core's linear layers add empty pickled objects, which we do not write."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    return {name: value for name, value in sharded.items() if not isinstance(value, ShardedObject)}
