"""The one table of names: a checkpoint's tensors and an exported folder's. Both directions read it; shapes are equal.

Rows of embedding and output layer beyond the vocabulary are the one difference: an export has them apart.
"""

from __future__ import annotations

import re

WHOLE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
"""Ours -> theirs, the tensors outside layers."""

IN_LAYER = {
    "input_layernorm.weight": "mixer_norm.weight",
    "pre_mlp_layernorm.weight": "mlp_norm.weight",
    "mlp.linear_fc1.weight": "mlp.gate_up.weight",
    "mlp.linear_fc2.weight": "mlp.down.weight",
}
"""Ours -> theirs, after the layer's number. gate_up is [2 ffn, hidden] in both, the gate first."""

MIXER = ("self_attention.mixer.", "mixer.")
"""How names of a mixer's parameters begin, ours and theirs; the rest is the same, since the code is."""

LAYER = ("decoder.layers.", "model.layers.")

VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
"""Theirs: the tensors with a row a token, whose padding rows are kept apart."""


def to_hf(name: str) -> str:
    """The exported name of a checkpoint's tensor. Raises ValueError for a name that no model of ours has."""
    return _translate(name, ours=True)


def to_ours(name: str) -> str:
    """The checkpoint's name of an exported tensor. Raises ValueError for a name that no model of ours has."""
    return _translate(name, ours=False)


def _translate(name: str, ours: bool) -> str:
    here, there = (0, 1) if ours else (1, 0)
    whole, inside = (WHOLE, IN_LAYER) if ours else (_turned(WHOLE), _turned(IN_LAYER))
    if name in whole:
        return whole[name]
    layer = re.fullmatch(re.escape(LAYER[here]) + r"(\d+)\.(.+)", name)
    if layer is not None:
        number, rest = layer.groups()
        if rest in inside:
            return f"{LAYER[there]}{number}.{inside[rest]}"
        if rest.startswith(MIXER[here]):
            return f"{LAYER[there]}{number}.{MIXER[there]}{rest.removeprefix(MIXER[here])}"
    kind = "checkpoint" if ours else "exported folder"
    raise ValueError(f"tensor {name}: no {kind} of this version has one of that name; update miras-megatron")


def _turned(table: dict[str, str]) -> dict[str, str]:
    return {theirs: ours for ours, theirs in table.items()}
