"""A mixer block in the `self_attention` slot of megatron-core's TransformerLayer.

Here Megatron's [s, b, h] becomes the layers' [B, T, d], and nowhere else. What a mixer needs besides
hidden states (document starts, states to go on from) travels in a MixerContext, handed through
TransformerBlock and TransformerLayer as their `packed_seq_params`; nothing is global.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from miras_megatron.layers import BlockSpec, build_block
from miras_megatron.layers.carry import LOCAL, StateCarry
from miras_megatron.layers.documents import CuSeqlens
from miras_megatron.parallel.tensor import MegatronLinearFactory, mark_splits, sharded_parameters

from .initialise import MIXER, place_generator

LayerStates = dict[int, Any]
"""Layer number (1 is the first of the whole model) -> the block's state, a pytree with the batch in dim 0."""


@dataclass
class MixerContext(PackedSeqParams):  # type: ignore[misc, unused-ignore]
    """What the mixers of one forward pass share.

    cu_seqlens   document starts of the rows, see layers.carry; None = a row is one document
    states       what to go on from, layer by layer; None or a missing layer = from the start
    returned     where each mixer leaves its state after the last token; None = nobody wants it
    carry        layer number -> how its state comes from the left and goes to the right
    """

    cu_seqlens: CuSeqlens = None
    states: LayerStates = field(default_factory=dict)
    returned: LayerStates | None = None
    carry: Callable[[int], StateCarry] = lambda layer: LOCAL


class MixerSlot(MegatronModule):  # type: ignore[misc, unused-ignore]
    """One block of miras_megatron.layers, called as megatron-core calls self-attention.

    letter, spec, seed   which block, of what sizes, drawn from what seed
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        *,
        letter: str,
        spec: BlockSpec,
        seed: int,
        pg_collection: Any,
        cp_comm_type: str | None = None,
        pp_layer_offset: int | None = None,
        name: str | None = None,
    ):
        super().__init__(config=config)
        self.layer_number, self.letter = layer_number, letter
        self.tp_group = pg_collection.tp
        factory = MegatronLinearFactory(config, pg_collection, place_generator(seed, MIXER + layer_number))
        self.mixer: nn.Module = build_block(letter, spec, factory, layer_number)
        _keep_gates_wide(self.mixer)
        mark_splits(self.mixer)

    def forward(
        self, hidden_states: Tensor, packed_seq_params: MixerContext | None = None, **unused: Any
    ) -> tuple[Tensor, None]:
        """[s, b, h] -> ([s, b, h], no bias); [s / tp, b, h] on both sides under sequence parallelism.

        `unused` are attention's arguments that a mixer has no use for: masks and rotary tables.
        """
        context = packed_seq_params or MixerContext()
        x = self._enter(hidden_states)
        state = context.states.get(self.layer_number)
        y, after = self.mixer(
            x,
            cu_seqlens=context.cu_seqlens,
            state=state,
            return_state=context.returned is not None,
            carry=context.carry(self.layer_number),
        )
        if context.returned is not None:
            context.returned[self.layer_number] = after
        return self._leave(y), None

    def _enter(self, hidden_states: Tensor) -> Tensor:
        if self.config.sequence_parallel:
            # Gradients inside are whole on every rank, so backward keeps a slice and adds nothing.
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return hidden_states.transpose(0, 1)

    def _leave(self, y: Tensor) -> Tensor:
        out = y.transpose(0, 1).contiguous()
        if self.config.sequence_parallel:
            out = scatter_to_sequence_parallel_region(out, group=self.tp_group)
        return out

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Every parameter of the mixer as a ShardedTensor, split by heads as it says itself."""
        return sharded_parameters(self.mixer, f"{prefix}mixer.", sharded_offsets, metadata, self.tp_group)


def _keep_gates_wide(mixer: nn.Module) -> None:
    """Gates are float32 whatever the precision (rules 10.2): their projections are those without weight decay."""
    for parameter in mixer.parameters():
        if getattr(parameter, "no_weight_decay", False) and parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.float()
