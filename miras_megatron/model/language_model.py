"""MemoryLanguageModel: tokens -> embedding -> blocks -> norm -> logits or losses, for the pipeline stage it is on."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from miras_megatron.layers.carry import CuSeqlens
from miras_megatron.parallel.cross_entropy import token_losses
from miras_megatron.parallel.tensor import gather_columns, without_objects

from .attention_slot import LayerStates, MixerContext

LOGITS_AT_ONCE = 1 << 25
"""Most logits of a rank that are held at once for the loss: 128 MB of float32."""


class MemoryLanguageModel(LanguageModule):  # type: ignore[misc, unused-ignore]
    """A causal language model whose token mixers are memory blocks.

    config       megatron's TransformerConfig
    submodules   the layers of this stage, from `specs.block_submodules`
    vocab_size   rows of the embedding over all ranks, padding included
    groups       megatron's ProcessGroupCollection
    pre_process, post_process   whether this stage has the embedding, the output layer
    """

    def __init__(
        self,
        config: Any,
        submodules: TransformerBlockSubmodules,
        vocab_size: int,
        groups: Any,
        *,
        tie_embeddings: bool = True,
        pre_process: bool = True,
        post_process: bool = True,
    ):
        super().__init__(config=config, pg_collection=groups)
        self.vocab_size = vocab_size
        self.pre_process, self.post_process = pre_process, post_process
        self.share_embeddings_and_output_weights = tie_embeddings
        self.model_type = ModelType.encoder_or_decoder
        if pre_process:
            self.embedding = LanguageModelEmbedding(
                config, vocab_size, max_sequence_length=0, position_embedding_type="none", tp_group=groups.tp
            )
        self.decoder = TransformerBlock(
            config, submodules, pre_process=pre_process, post_process=post_process, pg_collection=groups
        )
        if post_process:
            self.output_layer = self._make_output_layer()
        if pre_process or post_process:
            self.setup_embeddings_and_output_layer()

    def _set_attention_backend(self) -> None:
        """Nothing: core would set environment variables for an attention that is not used here."""

    def _make_output_layer(self) -> ColumnParallelLinear:
        return ColumnParallelLinear(
            self.config.hidden_size,
            self.vocab_size,
            config=self.config,
            init_method=nn.init.zeros_,
            bias=False,
            skip_bias_add=True,
            gather_output=False,
            skip_weight_param_allocation=self.pre_process and self.share_embeddings_and_output_weights,
            tp_group=self.tp_group,
        )

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Take what the stage before sent; megatron's schedule calls this."""
        received = input_tensor if isinstance(input_tensor, list) else [input_tensor]
        assert len(received) == 1, "a stage receives one tensor"
        self.decoder.set_input_tensor(received[0])

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        cu_seqlens: CuSeqlens = None,
        states: LayerStates | None = None,
        return_states: bool = False,
    ) -> Any:
        """One pass over rows of tokens.

        tokens      [b, T] int64
        labels      [b, T] int64, the next tokens; None = return logits
        loss_mask   [b, T], 0 where a token's loss does not count; those losses are returned as 0
        cu_seqlens  document starts in the rows: [0, .., T] for all rows or one tensor a row
        states      what a former call returned: the rows go on from there
        returns     losses [b, T] float32 in nats where labels are given, else logits [b, T, V] over the whole
                    (padded) vocabulary; on a stage without output layer hidden states [s, b, h].
                    With return_states a pair of that and the states after the last token.
        """
        context = MixerContext(cu_seqlens=cu_seqlens, states=states or {}, returned={} if return_states else None)
        hidden = self.embedding(tokens, position_ids=None) if self.pre_process else None
        hidden = self.decoder(hidden, attention_mask=None, packed_seq_params=context)
        if not self.post_process:
            out = hidden
        elif labels is None:
            out = self.whole_logits(hidden)
        else:
            out = self.losses(hidden, labels, loss_mask)
        return (out, context.returned) if return_states else out

    def logits(self, hidden: Tensor) -> Tensor:
        """[s, b, h] after the final norm -> this rank's logits [s, b, V / tp]."""
        shared = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        out: Tensor = self.output_layer(hidden, weight=shared)[0]
        return out

    def whole_logits(self, hidden: Tensor) -> Tensor:
        """[s, b, h] -> logits [b, T, V], gathered over tensor-parallel ranks."""
        return gather_columns(self.logits(hidden), self.tp_group).transpose(0, 1)

    def losses(self, hidden: Tensor, labels: Tensor, loss_mask: Tensor | None) -> Tensor:
        """[s, b, h] -> cross entropy of every token [b, T].

        Long sequences go in blocks of tokens whose logits are made again in backward: what is kept is one
        block's logits, not T x V of them.
        """
        labels = labels.transpose(0, 1).contiguous()
        size = self._loss_block(labels)
        if size >= labels.shape[0]:
            losses = self._block_losses(hidden, labels)
        else:
            blocks = zip(torch.split(hidden, size), torch.split(labels, size), strict=True)
            parts = [checkpoint(self._block_losses, *block, use_reentrant=False) for block in blocks]
            losses = torch.cat(parts)
        losses = losses.transpose(0, 1)
        return losses if loss_mask is None else torch.where(loss_mask > 0, losses, 0.0)

    def _loss_block(self, labels: Tensor) -> int:
        """Tokens of one block. Under sequence parallelism hidden states here are a part, so there is one block."""
        tokens, rows = labels.shape
        if self.config.sequence_parallel:
            return tokens
        return max(1, LOGITS_AT_ONCE * int(self.tp_group.size()) // (rows * self.vocab_size))

    def _block_losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return token_losses(self.logits(hidden), labels, self.tp_group)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Name -> ShardedTensor of every weight, and nothing that would have to be unpickled."""
        return without_objects(super().sharded_state_dict(prefix, sharded_offsets, metadata))
