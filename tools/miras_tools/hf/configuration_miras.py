"""Configuration of an exported Miras or Titans language model. Written by miras-to-hf; see README.md beside it."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

FORMAT = 1
"""Version of the folder; a newer one is refused."""


class MirasConfig(PretrainedConfig):
    """Sizes and choices of the model.

    pattern       one letter a layer: m memory, c memory as context, g memory as gate, w window, a full attention
    rule          {"name", "choices"} of the memory
    block         what else the mixers are built from, as layers' BlockSpec names it
    state_shapes  letter -> name -> shape of what a layer carries from token to token, for one row
    """

    model_type = "miras"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]

    def __init__(
        self,
        vocab_size: int = 257,
        hidden_size: int = 64,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 2,
        intermediate_size: int = 192,
        pattern: str = "mm",
        rule: dict[str, Any] | None = None,
        block: dict[str, Any] | None = None,
        state_shapes: dict[str, Any] | None = None,
        rms_norm_eps: float = 1e-6,
        initializer_range: float = 0.02,
        max_position_embeddings: int = 2048,
        use_cache: bool = True,
        tie_word_embeddings: bool = True,
        miras_format: int = FORMAT,
        **kwargs: Any,
    ) -> None:
        if miras_format > FORMAT:
            raise ValueError(
                f"miras_format = {miras_format}: this folder's files read up to {FORMAT}; export the checkpoint again"
            )
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.pattern = pattern
        self.rule = rule or {"name": "titans", "choices": {}}
        self.block = block or {}
        self.state_shapes = state_shapes or {}
        self.rms_norm_eps = rms_norm_eps
        self.initializer_range = initializer_range
        self.max_position_embeddings = max_position_embeddings
        self.use_cache = use_cache
        self.miras_format = miras_format
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
