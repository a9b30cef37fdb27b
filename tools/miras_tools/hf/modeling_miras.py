"""An exported Miras or Titans language model: the training framework's own layers, wired for transformers.

The mathematics is in the files beside this one (`memory.py`, `layers.py` and theirs), the very files that trained it.
Padding is taken out before anything is computed: rows are grouped by their number of real tokens.
"""

from __future__ import annotations

import inspect
import os
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .cache_miras import HIDDEN, LAST, MirasCache
from .configuration_miras import MirasConfig
from .inputs_miras import countable, real_tokens, refuse_empty, refuse_packed, refuse_read, without_ended
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


def wide_dtype() -> torch.dtype:
    """What a model that is being built keeps its memory, gates and norms in."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


class MirasRMSNorm(nn.Module):
    """x [..., d] -> x / sqrt(mean(x^2) + eps) * weight, in the wider dtype of the two; returns x's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, dtype=wide_dtype()))

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


WIDE = {
    *("weights", "gates", "query_conv", "key_value_conv", "memory_queries", "persistent"),
    *("norm", "mixer_norm", "mlp_norm", "context_norm", "attention_norm", "read_norm"),
}
"""Parts of names of parameters that training keeps in float32, whatever its precision."""


def _register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    module._parameters[name] = parameter


def new_mixer(letter: str, spec: BlockSpec, number: int) -> nn.Module:
    """The block of layer `number`, drawn on the CPU in float32 at least, whatever is the default just now.

    Libraries that build on the meta device replace register_parameter, by one that refuses marked parameters.
    """
    theirs, dtype = nn.Module.register_parameter, torch.get_default_dtype()
    nn.Module.register_parameter = _register  # type: ignore[method-assign, assignment]
    torch.set_default_dtype(wide_dtype())
    try:
        with torch.device("cpu"):
            return build_block(letter, spec, PlainLinear(), number)
    finally:
        nn.Module.register_parameter = theirs  # type: ignore[method-assign]
        torch.set_default_dtype(dtype)


def build_mixer(letter: str, spec: BlockSpec, number: int) -> nn.Module:
    """The block of layer `number`, where and in what new modules are made; constants that aren't in the weights' file
    stay on the CPU, since the meta device has no values."""
    mixer = new_mixer(letter, spec, number)
    for name, parameter in mixer.named_parameters():
        if not WIDE & set(name.split(".")):
            parameter.data = parameter.data.to(torch.get_default_dtype())
    for name, part in mixer.named_modules():
        part._miras_place = (letter, number, name)  # type: ignore[assignment]
    home = MirasRMSNorm(1, 0.0).weight.device
    if home.type != "meta":
        for part in [*mixer.modules(), *mixer.parameters()]:
            part._is_hf_initialized = True  # type: ignore[assignment, union-attr]
    return mixer.to(home)


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
        """Draw what isn't in the weights' file: parts of mixers as a new block has them. The rest of a mixer stays."""
        missing = {
            name: parameter
            for name, parameter in module.named_parameters(recurse=False)
            if not getattr(parameter, "_is_hf_initialized", False) and parameter.device.type != "meta"
        }
        if missing and hasattr(module, "_miras_place"):
            letter, number, name = module._miras_place  # type: ignore[misc]
            fresh = new_mixer(letter, block_spec(self.config), number).get_submodule(name)  # type: ignore[arg-type]
            for key, parameter in missing.items():
                wide = WIDE & {*name.split("."), key}  # type: ignore[union-attr]
                value = fresh.get_parameter(key).data
                parameter.data = value.to(parameter.device, value.dtype if wide else parameter.dtype)
        elif missing and isinstance(module, MirasRMSNorm):
            module.weight.data = torch.ones_like(module.weight, dtype=wide_dtype())
        elif missing and isinstance(module, nn.Embedding | nn.Linear):
            module.weight.normal_(0.0, self.config.initializer_range)

    def load_cache(self, path: str | os.PathLike[str]) -> MirasCache:
        """What `save` of a cache wrote, on the devices of this model. Raises ValueError for another file."""
        at = self.device if self.device.type != "meta" else torch.device("cpu")
        homes = {n: layer.mlp_norm.weight.device for n, layer in enumerate(self.base_model.layers, 1)}
        return MirasCache.load(path, {LAST: at} | {n: x if x.type != "meta" else at for n, x in homes.items()})


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
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: MirasCache | None = None,
        cache: MirasCache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """As every decoder of transformers. Raises ValueError for a cache that isn't ours or of another batch.

        attention_mask  [B, T] or [B, seen + T], 0 at pads, wherever they stand; at a pad comes out what came out at
                        the row's last token before it
        position_ids    not needed; ValueError where they begin anew: a row is one document
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        refuse_empty(x)
        cache = self._cache(cache if cache is not None else past_key_values, use_cache)
        if cache is not None:
            cache.expect(x.shape[0])
        real = real_tokens(attention_mask, *x.shape[:2], seen=cache.columns if cache is not None else 0)
        refuse_packed(position_ids, real, others)
        every = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        hidden = self._rows(x, real, cache, bool(every))
        if cache is not None:
            cache.saw(*x.shape[:2])
        last = self.norm(hidden[-1])
        out = BaseModelOutputWithPast(
            last_hidden_state=last, hidden_states=(x, *hidden[:-1], last) if every else None, **{CACHE_NAME: cache}
        )
        return out if wants_dict(self.config, return_dict) else out.to_tuple()

    def _cache(self, cache: MirasCache | None, use_cache: bool | None) -> MirasCache | None:
        if cache is not None and not isinstance(cache, MirasCache):
            raise ValueError(f"a cache of {type(cache).__name__}: this model takes a MirasCache, or none and makes one")
        wanted = self.config.use_cache if use_cache is None else use_cache
        if self.training and self.gradient_checkpointing:
            wanted = False
        return MirasCache() if cache is None and wanted else cache

    def _rows(self, x: Tensor, real: Tensor, cache: MirasCache | None, every: bool) -> list[Tensor]:
        """What the layers, or the last alone, make of the real tokens of x [B, T, d], given out at all columns."""
        groups = groups_of_rows(real, cache)
        if len(groups) == 1 and bool(real.all()):
            return [y.to(x.device) for y in self._layers(x, groups[0], cache, every)]
        parts = [self._group(x, real[rows], rows, cache, every) for rows in groups]
        order = torch.tensor([row for rows in groups for row in rows], device=x.device).argsort()
        return [torch.cat(group)[order] for group in zip(*parts, strict=True)]

    def _group(self, x: Tensor, real: Tensor, rows: list[int], cache: MirasCache | None, every: bool) -> list[Tensor]:
        """As `_rows`, of rows with equally many real tokens [G, T]; each pad has what its row's last token before it
        has, of an earlier call where need be, or zeros."""
        zeros = x.new_zeros(len(rows), 1, x.shape[-1])
        last = cache.last(rows)[:, None].to(x) if cache is not None and cache.started(rows[0]) else zeros
        outs = [x.new_zeros(len(rows), 0, x.shape[-1])] * (len(self.layers) if every else 1)
        if count := int(real[0].sum()):
            columns = real.nonzero()[:, 1].view(len(rows), count).to(x.device)
            chosen = x[torch.tensor(rows, device=x.device)].gather(1, columns[..., None].expand(-1, -1, x.shape[-1]))
            outs = [y.to(x.device) for y in self._layers(chosen, rows, cache, every)]
        source = real.cumsum(1).to(x.device)[..., None].expand(-1, -1, x.shape[-1])
        firsts = [zeros] * (len(outs) - 1) + [last]
        return [torch.cat([first, y], 1).gather(1, source) for first, y in zip(firsts, outs, strict=True)]

    def _layers(self, x: Tensor, rows: list[int], cache: MirasCache | None, every: bool) -> list[Tensor]:
        """All layers over x [G, T, d], which has no pads and are `rows` of the cache."""
        before = cache.take(rows) if cache is not None else {}
        after, outs = {}, []
        for number, layer in enumerate(self.layers, 1):
            x, after[number] = layer(x, before.get(number), cache is not None)
            outs = [*outs, x] if every else [x]
        if cache is not None and x.shape[1]:
            cache.put(rows, after | {LAST: {HIDDEN: x[:, -1].clone()}})
        return outs


def groups_of_rows(real: Tensor, cache: MirasCache | None) -> list[list[int]]:
    """Rows with equally many real tokens; those that have seen nothing yet don't go with those that have."""
    groups: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for row, count in enumerate(real.sum(1).tolist()):
        groups[count, cache is not None and cache.started(row)].append(row)
    return list(groups.values())


def wants_dict(config: MirasConfig, return_dict: bool | None) -> bool:
    """Whether an output is asked for by names rather than as a tuple."""
    return bool(getattr(config, "return_dict", True)) if return_dict is None else return_dict


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
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: MirasCache | None = None,
        cache: MirasCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """As every causal language model of transformers; labels are shifted inside, -100 is left out, and so is a
        label whose predecessor is a pad."""
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            cache=cache if cache is not None else past_key_values,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            counted = countable(labels, attention_mask)
            loss = self.loss_function(logits=logits, labels=counted, vocab_size=self.config.vocab_size, **kwargs)
        given = CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=out.hidden_states, **{CACHE_NAME: getattr(out, CACHE_NAME)}
        )
        return given if wants_dict(self.config, return_dict) else given.to_tuple()

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *unused: Any, **also: Any
    ) -> None:
        """Our cache, before the first forward: a prompt that is read in parts needs it then. And what ends rows."""
        given = [model_kwargs[n] for n in ("cache", "past_key_values") if model_kwargs.get(n) is not None]
        if given:
            refuse_read(given[0], model_kwargs)
        elif generation_config.use_cache:
            model_kwargs[CACHE_NAME] = MirasCache()
        ends, pad = (getattr(generation_config, f"_{name}_token_tensor", None) for name in ("eos", "pad"))
        if ends is not None and pad is not None:
            model_kwargs["ending"] = (0, ends, pad)

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *others: Any, **also: Any
    ) -> dict[str, Any]:
        """As transformers', counting the tokens that are made."""
        if "ending" in model_kwargs:
            made, *ids = model_kwargs["ending"]
            model_kwargs["ending"] = (made + 1, *ids)
        updated: dict[str, Any] = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *others, **also)
        return updated

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, *others: Any, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """As transformers', but a row's memory doesn't read the pads that it is fed after its end.

        transformers looks for inputs_embeds among these names to see whether a prompt may be embedded.
        """
        made, *ids = kwargs.pop("ending", None) or (0,)
        kwargs["inputs_embeds"] = inputs_embeds
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, *others, **kwargs)
        if made or inputs_embeds is not None:
            inputs.pop("position_ids", None)  # transformers counts on from pads or from 0, and no embedded tokens
        return without_ended(inputs, input_ids[:, -made:], *ids) if made and ids else inputs
