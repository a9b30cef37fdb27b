"""What a model of a configuration holds: the shape of every weight, and of what a layer carries from token to token.

One layer of each letter is built and asked; nothing is written down twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from miras_megatron.config.schema import Run
from miras_megatron.layers import BlockSpec, PlainLinear, build_block
from miras_megatron.layers.linear import Projection
from miras_megatron.memory import MemoryState
from miras_megatron.model.build import DTYPES, block_spec

Shape = tuple[int, ...]


def weight_shapes(run: Run) -> dict[str, Shape]:
    """Name in the checkpoint -> shape over all ranks, of every weight of `run`; vocabulary padding included."""
    model, spec = run.model, block_spec(run)
    table = (model.padded_vocab(), model.hidden)
    mixers = {letter: _mixer_shapes(letter, spec) for letter in dict.fromkeys(model.letters)}
    shapes: dict[str, Shape] = {"embedding.word_embeddings.weight": table}
    for number, letter in enumerate(model.letters):
        prefix = f"decoder.layers.{number}."
        shapes |= {prefix + name: shape for name, shape in _layer_shapes(run).items()}
        shapes |= {f"{prefix}self_attention.mixer.{name}": shape for name, shape in mixers[letter].items()}
    shapes["decoder.final_layernorm.weight"] = (model.hidden,)
    return shapes if model.tie_embeddings else shapes | {"output_layer.weight": table}


def weight_dtypes(run: Run) -> dict[str, torch.dtype]:
    """Name in the checkpoint -> dtype that training has it in: bf16 where training.precision says so, but float32 what
    is no projection, and the projections of gates."""
    spec, wide = block_spec(run), {"decoder.final_layernorm.weight"}
    mixers = {letter: _wide_in_mixer(_build(letter, spec)) for letter in dict.fromkeys(run.model.letters)}
    for number, letter in enumerate(run.model.letters):
        prefix = f"decoder.layers.{number}."
        wide |= {prefix + "input_layernorm.weight", prefix + "pre_mlp_layernorm.weight"}
        wide |= {f"{prefix}self_attention.mixer.{name}" for name in mixers[letter]}
    narrow = DTYPES[run.training.precision]
    return {name: torch.float32 if name in wide else narrow for name in weight_shapes(run)}


def _wide_in_mixer(mixer: nn.Module) -> list[str]:
    weights = [part.weight for part in mixer.modules() if isinstance(part, Projection)]
    narrow = {id(weight) for weight in weights if not getattr(weight, "no_weight_decay", False)}
    return [name for name, parameter in mixer.named_parameters() if id(parameter) not in narrow]


def state_shapes(run: Run) -> dict[str, dict[str, list[int]]]:
    """Letter -> flat name -> shape of what a layer of that letter carries after one token, for one row.

    Layers of full attention keep every token, so theirs grows.
    """
    spec = block_spec(run)
    return {letter: _state_shapes(letter, spec) for letter in dict.fromkeys(run.model.letters)}


def _layer_shapes(run: Run) -> dict[str, Shape]:
    hidden, ffn = run.model.hidden, run.model.ffn_width
    return {
        "input_layernorm.weight": (hidden,),
        "pre_mlp_layernorm.weight": (hidden,),
        "mlp.linear_fc1.weight": (2 * ffn, hidden),
        "mlp.linear_fc2.weight": (hidden, ffn),
    }


def _build(letter: str, spec: BlockSpec) -> nn.Module:
    return build_block(letter, spec, PlainLinear(torch.Generator().manual_seed(0)), 1)


def _mixer_shapes(letter: str, spec: BlockSpec) -> dict[str, Shape]:
    return {name: tuple(parameter.shape) for name, parameter in _build(letter, spec).named_parameters()}


def _state_shapes(letter: str, spec: BlockSpec) -> dict[str, list[int]]:
    token = torch.zeros(1, 1, spec.hidden)
    with torch.inference_mode():
        _, state = _build(letter, spec)(token, cu_seqlens=None, state=None, return_state=True)
    return {name: list(tensor.shape) for name, tensor in _flat(state)}


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Dotted name and tensor of everything in a layer's state."""
    if isinstance(tree, MemoryState):
        tree = tree.tensors()
    if isinstance(tree, Tensor):
        yield prefix.rstrip("."), tree
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, tuple | list) else ()
    for name, part in items:
        yield from _flat(part, f"{prefix}{name}.")
