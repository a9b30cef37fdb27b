"""The letters of a layer pattern, one line a block. MAL is the pattern "mw"."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from .block_spec import BlockSpec
from .full_attention import FullAttention
from .linear import LinearFactory
from .memory_as_context import MemoryAsContext
from .memory_mixer import MemoryMixer
from .titans_blocks import MemoryAsGate
from .window_attention import WindowAttention

BLOCKS: dict[str, Callable[[BlockSpec, LinearFactory, torch.Generator], nn.Module]] = {
    "m": MemoryMixer,
    "c": MemoryAsContext,
    "g": MemoryAsGate,
    "w": WindowAttention,
    "a": FullAttention,
}


def build_block(letter: str, spec: BlockSpec, factory: LinearFactory, layer_number: int) -> nn.Module:
    """The mixer of layer `layer_number` (from 1): `forward(x, *, cu_seqlens, state, return_state) -> (y, state)`.

    What heads own is drawn from `spec.seed` and the layer's number, for all heads, and cut for this rank.
    Raises ValueError for an unknown letter or heads that ranks can't share.
    """
    if letter not in BLOCKS:
        raise ValueError(f"pattern letter {letter!r}: unknown; the letters are {', '.join(BLOCKS)}")
    if spec.heads % factory.shards:
        raise ValueError(f"heads = {spec.heads}: not divisible by the {factory.shards} ranks that share them")
    generator = torch.Generator().manual_seed(spec.seed * 100_003 + layer_number)
    return BLOCKS[letter](spec, factory, generator)
