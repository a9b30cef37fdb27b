"""An exported Miras or Titans language model: the training framework's own layers, wired for transformers.

The mathematics is in the files beside this one (`memory.py`, `layers.py` and theirs), the very files that trained it.
Padding is taken out before anything is computed: rows are grouped by their number of real tokens.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .cache_miras import MirasCache
from .configuration_miras import MirasConfig
from .layers import BlockSpec, PlainLinear, build_block
from .memory import make_rule

CACHE_NAME = "cache" if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters else ""
CACHE_NAME = CACHE_NAME or "past_key_values"
"""What this version of transformers calls the cache."""


def block_spec(config: MirasConfig) -> BlockSpec:
    """What the mixers are built from."""
    return BlockSpec(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        norm_eps=config.rms_norm_eps,
        layers=config.num_hidden_layers,
        rule=make_rule(config.rule["name"], **config.rule["choices"]),
        **config.block,
    )


class MirasRMSNorm(nn.Module):
    """x [..., d] -> x / sqrt(mean(x^2) + eps) * weight, in the wider dtype of the two; returns x's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        wide = torch.promote_types(x.dtype, self.weight.dtype)
        return rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps).to(x.dtype)


class MirasMLP(nn.Module):
    """W_2 (silu(W_g x) * W_1 x); W_g and W_1 are one matrix, the gate first."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        gate, up = self.gate_up(x).chunk(2, -1)
        out: Tensor = self.down(silu(gate) * up)
        return out


class MirasLayer(GradientCheckpointingLayer):
    """Norm, mixer, norm, MLP, each pair with a residual."""

    def __init__(self, config: MirasConfig, spec: BlockSpec, number: int) -> None:
        super().__init__()
        self.mixer_norm = MirasRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mixer = build_mixer(config.pattern[number - 1], spec, number)
        self.mlp_norm = MirasRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MirasMLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, state: Any = None, return_state: bool = False) -> tuple[Tensor, Any]:
        """x [B, T, d], one document a row -> the same, and the mixer's state where asked for."""
        mixed, after = self.mixer(self.mixer_norm(x), state=state, return_state=return_state)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), after


REGISTER = nn.Module.register_parameter
"""torch's own: transformers 4 replaces it while it builds on the meta device, by one that refuses marked parameters."""


def build_mixer(letter: str, spec: BlockSpec, number: int) -> nn.Module:
    """The block of layer `number`. Constants that aren't in the weights' file are made on the CPU even where
    transformers builds on the meta device, which has no values."""
    theirs, nn.Module.register_parameter = nn.Module.register_parameter, REGISTER  # type: ignore[method-assign]
    try:
        with torch.device("cpu"):
            mixer = build_block(letter, spec, PlainLinear(), number)
    finally:
        nn.Module.register_parameter = theirs  # type: ignore[method-assign]
    if theirs is not REGISTER or torch.empty(0).device.type == "meta":
        return mixer.to("meta")
    for part in [*mixer.modules(), *mixer.parameters()]:
        part._is_hf_initialized = True  # type: ignore[assignment, union-attr]
    return mixer


WIDE = {
    *("weights", "gates", "query_conv", "key_value_conv", "memory_queries", "persistent"),
    *("norm", "mixer_norm", "mlp_norm", "context_norm", "attention_norm", "read_norm"),
}
"""Parts of names of parameters that training keeps in float32, whatever its precision."""


class MirasPreTrainedModel(PreTrainedModel):
    """What transformers asks of a family of models."""

    config_class = MirasConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MirasLayer"]
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _is_stateful = True
    _supports_sdpa = True

    @classmethod
    def _supports_default_dynamic_cache(cls, *unused: Any) -> bool:
        return False

    def post_init(self) -> None:
        """As transformers', which wants names of what is kept in float32, and of nothing that isn't there."""
        parts = {part for name, _ in self.named_parameters() for part in name.split(".")}
        self._keep_in_fp32_modules_strict = WIDE & parts
        plan = getattr(self, "dtype_plan", None)
        if isinstance(plan, dict):  # transformers 5.0 has made it from the class
            plan.update(dict.fromkeys(WIDE & parts, torch.float32))
        super().post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Embedding and MLPs; mixers are drawn when they are built."""
        if isinstance(module, nn.Embedding | nn.Linear) and not getattr(module.weight, "_is_hf_initialized", False):
            module.weight.normal_(0.0, self.config.initializer_range)


class MirasModel(MirasPreTrainedModel):
    """Tokens -> hidden states after the final norm."""

    def __init__(self, config: MirasConfig) -> None:
        super().__init__(config)
        spec = block_spec(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(MirasLayer(config, spec, n) for n in range(1, config.num_hidden_layers + 1))
        self.norm = MirasRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: MirasCache | None = None,
        cache: MirasCache | None = None,
        use_cache: bool | None = None,
        **unused: Any,
    ) -> BaseModelOutputWithPast:
        """As every decoder of transformers. Raises ValueError for a cache that isn't ours.

        attention_mask  [B, T] or [B, seen + T], 0 at pads, wherever they stand; what comes out at pads means nothing
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._cache(cache if cache is not None else past_key_values, use_cache)
        hidden = self._rows(x, attention_mask, cache)
        if cache is not None:
            cache.saw(*x.shape[:2])
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden), **{CACHE_NAME: cache})

    def _cache(self, cache: MirasCache | None, use_cache: bool | None) -> MirasCache | None:
        if cache is not None and not isinstance(cache, MirasCache):
            raise ValueError(f"a cache of {type(cache).__name__}: this model takes a MirasCache, or none and makes one")
        wanted = self.config.use_cache if use_cache is None else use_cache
        if self.training and self.gradient_checkpointing:
            wanted = False
        return MirasCache() if cache is None and wanted else cache

    def _rows(self, x: Tensor, mask: Tensor | None, cache: MirasCache | None) -> Tensor:
        """All layers over the real tokens of x [B, T, d]; zeros at pads."""
        out = None
        for rows, columns in groups_of_rows(mask, x, cache):
            if columns is None:
                return self._layers(x, rows, cache)
            index = columns.to(x.device)[..., None].expand(-1, -1, x.shape[-1])
            chosen = torch.tensor(rows, device=x.device)
            hidden = self._layers(x[chosen].gather(1, index), rows, cache)
            out = torch.zeros_like(x) if out is None else out
            out = out.index_add(0, chosen, torch.zeros_like(x[chosen]).scatter(1, index, hidden))
        return torch.zeros_like(x) if out is None else out

    def _layers(self, x: Tensor, rows: list[int], cache: MirasCache | None) -> Tensor:
        """All layers over x [G, T, d], which has no pads and are `rows` of the cache."""
        before = cache.take(rows) if cache is not None else {}
        after = {}
        for number, layer in enumerate(self.layers, 1):
            x, after[number] = layer(x, before.get(number), cache is not None)
        if cache is not None:
            cache.put(rows, after)
        return x


def groups_of_rows(
    mask: Tensor | None, x: Tensor, cache: MirasCache | None
) -> Iterator[tuple[list[int], Tensor | None]]:
    """Rows with equally many real tokens, and where these are [G, n]; None: all rows, everywhere.

    Rows that have seen nothing yet don't go with those that have. A row of pads alone is in no group.
    """
    batch, tokens = x.shape[:2]
    real = torch.ones(batch, tokens, dtype=torch.bool) if mask is None else mask[:, -tokens:].bool().cpu()
    started = [cache is not None and cache.started(row) for row in range(batch)]
    if bool(real.all()) and len(set(started)) == 1:
        yield list(range(batch)), None
        return
    groups: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for row in range(batch):
        groups[int(real[row].sum()), started[row]].append(row)
    for (count, _), rows in groups.items():
        if count:
            yield rows, torch.stack([real[row].nonzero().flatten() for row in rows])


class MirasForCausalLM(MirasPreTrainedModel, GenerationMixin):
    """A language model: MirasModel and the output layer."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: MirasConfig) -> None:
        super().__init__(config)
        self.model = MirasModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: MirasCache | None = None,
        cache: MirasCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """As every causal language model of transformers; labels are shifted inside, -100 is left out."""
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            cache=cache if cache is not None else past_key_values,
            use_cache=use_cache,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE_NAME: getattr(out, CACHE_NAME)})

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *unused: Any, **also: Any
    ) -> None:
        """Our cache, before the first forward: a prompt that is read in parts needs it then."""
        given = any(model_kwargs.get(name) is not None for name in ("cache", "past_key_values"))
        if generation_config.use_cache and not given:
            model_kwargs[CACHE_NAME] = MirasCache()
