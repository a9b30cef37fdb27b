"""A pattern of letters -> megatron-core's ModuleSpecs: RMSNorm, mixer, RMSNorm, SwiGLU MLP in every layer."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from miras_megatron.layers import BlockSpec

from .attention_slot import MixerSlot
from .mlp import SwiGLU
from .norm import RMSNorm


class RecomputedLayer(TransformerLayer):  # type: ignore[misc, unused-ignore]
    """A layer that keeps its input only and is computed again in backward.

    Core's own recomputation restores CUDA random states, of which a CPU has none; there is no dropout here.
    """

    def forward(self, hidden_states: Tensor, **options: Any) -> Any:
        if self.training and torch.is_grad_enabled():
            return checkpoint(super().forward, hidden_states, use_reentrant=False, preserve_rng_state=False, **options)
        return super().forward(hidden_states, **options)


def block_submodules(letters: str, spec: BlockSpec, seed: int, recompute: bool) -> TransformerBlockSubmodules:
    """The layers `letters` of one pipeline stage, first to last, and the final norm."""
    layers = [layer_spec(letter, spec, seed, recompute) for letter in letters]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def layer_spec(letter: str, spec: BlockSpec, seed: int, recompute: bool = False) -> ModuleSpec:
    """One TransformerLayer with the block `letter` in its self-attention slot."""
    return ModuleSpec(
        module=RecomputedLayer if recompute else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(module=MixerSlot, params={"letter": letter, "spec": spec, "seed": seed}),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=SwiGLU,
            mlp_bda=get_bias_dropout_add,
        ),
    )
