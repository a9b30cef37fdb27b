"""Small mixer blocks in float64 with weights large enough that a mistake shows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from miras_megatron.layers import BlockSpec, PlainLinear, build_block
from miras_megatron.memory import Rule, make_rule

HIDDEN = 16

BLOCK_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lmm": ("m", {}),
    "lmm-no-conv": ("m", {"conv": 0}),
    "lmm-writes-persistent": ("m", {"persistent_tokens": 2, "write_persistent": True}),
    "mac": ("c", {"persistent_tokens": 3}),
    "mac-no-persistent-no-conv": ("c", {"conv": 0}),
    "mac-memory-tokens": ("c", {"memory_tokens": 3, "persistent_tokens": 2}),
    "mac-chunk-over-segment": ("c", {"chunk_size": 12}),
    "mag": ("g", {"persistent_tokens": 3}),
    "mag-no-persistent": ("g", {}),
    "mag-writes-persistent": ("g", {"persistent_tokens": 3, "write_persistent": True}),
    "window": ("w", {"persistent_tokens": 3}),
    "window-no-persistent": ("w", {}),
    "full": ("a", {}),
}
"""Name -> letter and what differs from `small_spec`; segment 8, chunk 4, window 5."""


def small_spec(rule: str | Rule = "titans", **changes: Any) -> BlockSpec:
    """16 channels in 2 heads, inner rates within the stability bound."""
    sizes: dict[str, Any] = {
        "hidden": HIDDEN,
        "heads": 2,
        "rule": make_rule(rule) if isinstance(rule, str) else rule,
        "chunk_size": 4,
        "segment": 8,
        "window": 5,
        "horizon": 30.0,
        "lr_max": 0.02,
        "lr_init": 0.5,
    }
    return BlockSpec(**sizes | changes)


def small_block(letter: str, spec: BlockSpec, spread: float = 0.1) -> nn.Module:
    """The block with noise on every parameter, so that no start value hides a mistake."""
    generator = torch.Generator().manual_seed(3)
    block = build_block(letter, spec, PlainLinear(generator), 1).double()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter += spread * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return block


def named_block(name: str) -> nn.Module:
    """The block of a case of BLOCK_CASES."""
    letter, changes = BLOCK_CASES[name]
    return small_block(letter, small_spec(**changes))


def hidden_states(batch: int, tokens: int, seed: int = 0) -> Tensor:
    """[B, T, 16] float64 normal."""
    return torch.randn(
        batch, tokens, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * seed + tokens)
    )


def state_tensors(state: Any) -> list[Tensor]:
    """The tensors of a state, in order."""
    return [x for x in pytree.tree_leaves(state) if isinstance(x, Tensor)]
