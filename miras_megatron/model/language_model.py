"""MemoryLanguageModel: tokens -> embedding -> blocks -> norm -> logits or losses, for the pipeline stage it is on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from miras_megatron.config.sizes import LOGITS_AT_ONCE
from miras_megatron.layers.documents import CuSeqlens
from miras_megatron.parallel.carry_relay import Passage
from miras_megatron.parallel.cross_entropy import token_losses
from miras_megatron.parallel.pieces import Relay
from miras_megatron.parallel.tensor import gather_columns, without_objects

from .attention_slot import LayerStates, MixerContext


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
        self.relay: Relay | None = None
        self._received: Tensor | None = None

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
        self._received = received[0]

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        cu_seqlens: CuSeqlens = None,
        states: LayerStates | None = None,
        return_states: bool = False,
        row_tokens: int | None = None,
    ) -> Any:
        """One pass over rows of tokens.

        tokens      [b, T] int64
        labels      [b, T] int64, the next tokens; None = return logits
        loss_mask   [b, T], 0 where a token's loss does not count; those losses are returned as 0
        cu_seqlens  document starts in the rows: [0, .., T] for all rows or one tensor a row; of the whole rows
                    where ranks share them (`relay`), whose slices T then are
        states      what a former call returned: the rows go on from there
        returns     losses [b, T] float32 in nats where labels are given, else logits [b, T, V] over the whole
                    (padded) vocabulary; on a stage without output layer hidden states [s, b, h].
                    With return_states a pair of that and the states after the last token.
        row_tokens  tokens of the whole rows; T on each rank of `relay` unless given
        """
        if self.relay is not None and states is None and not return_states:
            return self._in_pieces(self.relay, tokens, labels, loss_mask, cu_seqlens, row_tokens)
        context = MixerContext(cu_seqlens=cu_seqlens, states=states or {}, returned={} if return_states else None)
        out = self._pass(tokens, labels, loss_mask, self._received, context)
        return (out, context.returned) if return_states else out

    def _pass(
        self,
        tokens: Tensor,
        labels: Tensor | None,
        loss_mask: Tensor | None,
        received: Tensor | None,
        context: MixerContext,
    ) -> Tensor:
        """This stage, once: `received` [s, b, h] is what the stage before made."""
        embedded = self.embedding(tokens, position_ids=None) if self.pre_process else None
        self.decoder.set_input_tensor(received)
        hidden: Tensor = self.decoder(embedded, attention_mask=None, packed_seq_params=context)
        if not self.post_process:
            return hidden
        return self.whole_logits(hidden) if labels is None else self.losses(hidden, labels, loss_mask)

    def _in_pieces(
        self,
        relay: Relay,
        tokens: Tensor,
        labels: Tensor | None,
        loss_mask: Tensor | None,
        cu_seqlens: CuSeqlens,
        row_tokens: int | None,
    ) -> Tensor:
        """This stage, piece after piece: the slice of each rank is its pieces, one after the other."""
        cut = relay.cut(row_tokens or tokens.shape[1] * relay.ring.size)
        lengths = cut.lengths(relay.ring.index)
        assert sum(lengths) == tokens.shape[1], f"a slice of {tokens.shape[1]} tokens for pieces of {lengths}"
        slices = [None if x is None else x.split(lengths, 1) for x in (tokens, labels, loss_mask)]

        def stage(number: int, received: Tensor | None, passage: Passage, documents: CuSeqlens) -> Tensor:
            inputs = [None if x is None else x[number] for x in slices]
            context = MixerContext(cu_seqlens=documents, carry=passage.carry)
            assert inputs[0] is not None
            return self._pass(inputs[0], inputs[1], inputs[2], received, context)

        hidden: Sequence[Tensor | None] = [None] * len(lengths)
        if self._received is not None:
            split = int(self.tp_group.size()) if self.config.sequence_parallel else 1
            hidden = self._received.split([length // split for length in lengths], 0)
        dim = 1 if self.post_process else 0
        return relay.walk(stage, cut, tokens.shape[0], cu_seqlens, hidden, list(self.parameters()), dim)

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
