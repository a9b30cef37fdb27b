"""What the weights are before the first step (rules 12.5), and which of them decay (rules 12.6).

Every layer draws from a generator of its own, made from the seed and the layer's number, and always the
whole weight before it is cut: the model is the same for any number of tensor- or pipeline-parallel ranks.
Blocks draw theirs as they are built; here are the weights that megatron-core made.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from miras_megatron.parallel.tensor import own_slice

STEP = 1_000_003
"""A prime larger than any number of layers, so that no two seeds share a layer's generator."""

EMBEDDING, OUTPUT, MLP, MIXER = 500_001, 500_002, 600_000, 700_000
"""Places of core's weights among the generators of a seed; what heads own, a block draws
itself; the projections of mixer i from MIXER + i, the two matrices of its MLP from MLP + 2 i and the next."""


def place_generator(seed: int, place: int) -> torch.Generator:
    """The generator of one of the places above."""
    return torch.Generator().manual_seed(seed * STEP + place)


@torch.no_grad()
def draw_core_weights(model: nn.Module, seed: int, init_std: float, out_std: float, shards: int, index: int) -> None:
    """Fill embedding, MLP and output weights: normal with `init_std`, the MLP's second matrix with `out_std`.

    shards, index   tensor-parallel ranks and this one's place among them
    """
    for name, parameter in model.named_parameters():
        if "self_attention" in name or "norm" in name:
            continue
        std = out_std if "linear_fc2" in name else init_std
        _draw(parameter, std, place_generator(seed, _place(name, model)), shards, index)


def _place(name: str, model: nn.Module) -> int:
    if "embedding" in name:
        return EMBEDDING
    if "output_layer" in name:
        return EMBEDDING if getattr(model, "share_embeddings_and_output_weights", False) else OUTPUT
    match = re.search(r"layers\.(\d+)\.", name)
    assert match is not None, f"no rule for the start of {name}"
    layer: Any = model.get_submodule(name[: match.end() - 1])
    return MLP + 2 * int(layer.layer_number) + ("linear_fc2" in name)


def _draw(parameter: Any, std: float, generator: torch.Generator, shards: int, index: int) -> None:
    dim, stride = getattr(parameter, "partition_dim", -1), getattr(parameter, "partition_stride", 1)
    shape = list(parameter.shape)
    if dim >= 0:
        shape[dim] *= shards
    full = torch.empty(shape).normal_(0.0, std, generator=generator)
    parameter.copy_(own_slice(full, dim if dim >= 0 else None, shards, index, stride))


def mark_decay(model: nn.Module) -> None:
    """Set `no_weight_decay` on every parameter: only matrices of projections decay.

    A last stage's output layer may be its copy of the embedding: it is spared too, or the copies part.
    """
    embeddings = ["embedding"] + ["output_layer"] * getattr(model, "share_embeddings_and_output_weights", False)
    for name, parameter in model.named_parameters():
        spared = getattr(parameter, "no_weight_decay", False) or parameter.dim() < 2
        spared = spared or any(part in name for part in embeddings)
        parameter.no_weight_decay = spared  # type: ignore[attr-defined]


def decays(parameter: nn.Parameter) -> bool:
    """Whether weight decay acts on this parameter of a model that `build_model` made."""
    return not getattr(parameter, "no_weight_decay", False)
