"""build_model(run, mesh): from a run's configuration to a model on its device, and how large its parts are."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from miras_megatron.compat.apex import describe
from miras_megatron.config.schema import Run
from miras_megatron.config.stability import inner_lr_max
from miras_megatron.layers import BlockSpec
from miras_megatron.memory import make_rule
from miras_megatron.parallel.layout import decide_layout
from miras_megatron.parallel.mesh import ParallelMesh
from miras_megatron.parallel.pieces import Relay

from .initialise import draw_core_weights, mark_decay
from .language_model import MemoryLanguageModel
from .specs import block_submodules

logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_model(run: Run, mesh: ParallelMesh, vocab_size: int | None = None) -> MemoryLanguageModel:
    """The model of `run` for this rank's pipeline stage, drawn from training.seed, on the mesh's device.

    vocab_size   tokens of the tokenizer; model.vocab_size wins where given

    Projections and embeddings are bf16 where training.precision says so; memory weights, gates, norms and
    convolutions stay float32, and so do the states.
    """
    config, spec = transformer_config(run, mesh), block_spec(run)
    model = MemoryLanguageModel(
        config,
        block_submodules(_stage_letters(run.model.letters, mesh), spec, run.training.seed, run.training.recompute),
        run.model.padded_vocab(vocab_size),
        mesh.groups,
        tie_embeddings=run.model.tie_embeddings,
        pre_process=mesh.is_first_stage,
        post_process=mesh.is_last_stage,
    )
    layout = decide_layout(run)
    if layout.shares:
        model.relay = Relay(
            mesh.ring,
            per_rank=layout.pieces,
            head_groups=layout.head_groups,
            keep_last=layout.forwards_ahead == 0 and (layout.pieces == 1 or mesh.pipeline == 1),
            kept_in=run.parallel.keep_states,
            every=run.parallel.replay_every,
            carry="relay" if layout.carry == "local" else layout.carry,
            group=mesh.groups.cp,
        )
    draw_core_weights(model, run.training.seed, spec.init_std, spec.out_std, mesh.tensor, mesh.tensor_rank)
    mark_decay(model)
    model.to(mesh.device)
    log = logger.info if mesh.is_main else logger.debug
    log("%s; %s", describe_parameters(model), describe(mesh.device))
    return model


def _stage_letters(letters: str, mesh: ParallelMesh) -> str:
    """The layers of this stage: equal parts, first to last."""
    if len(letters) % mesh.pipeline:
        raise ValueError(f"model.layers = {len(letters)}: must be a multiple of parallel.pipeline ({mesh.pipeline})")
    count = len(letters) // mesh.pipeline
    return letters[mesh.pipeline_rank * count :][:count]


def block_spec(run: Run) -> BlockSpec:
    """The sizes and choices of the mixers."""
    model, memory = run.model, run.memory
    rule = make_rule(memory.rule, **memory.choices)
    same = {
        **{name: getattr(model, name) for name in ("hidden", "heads", "window", "segment", "memory_tokens")},
        **{name: getattr(model, name) for name in ("persistent_tokens", "write_persistent", "conv", "rope_base")},
        **{name: getattr(model, name) for name in ("norm_eps", "init_std", "layers")},
        **{name: getattr(memory, name) for name in ("chunk_size", "checkpoint_every", "gates", "gate_rank")},
        **{name: getattr(memory, name) for name in ("gates_per_layer", "horizon_spread", "lr_init", "momentum_init")},
        **{name: getattr(memory, name) for name in ("delta", "delta_init")},
    }
    return BlockSpec(
        rule=rule,
        horizon=float(memory.horizon if memory.horizon is not None else run.data.sequence_length),
        lr_max=inner_lr_max(run),
        seed=run.training.seed,
        **same,
    )


def transformer_config(run: Run, mesh: ParallelMesh) -> Any:
    """megatron-core's configuration for `run`."""
    dtype, fused = DTYPES[run.training.precision], mesh.device.type == "cuda"
    return TransformerConfig(
        num_layers=run.model.layers,
        hidden_size=run.model.hidden,
        num_attention_heads=run.model.heads,
        ffn_hidden_size=run.model.ffn_width,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=run.model.norm_eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        masked_softmax_fusion=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=mesh.tensor,
        pipeline_model_parallel_size=mesh.pipeline,
        context_parallel_size=mesh.context,
        sequence_parallel=run.parallel.sequence and mesh.tensor > 1,
        # Core's own draws differ with the number of ranks, so `draw_core_weights` fills the weights.
        init_method=nn.init.zeros_,
        output_layer_init_method=nn.init.zeros_,
        embedding_init_method=nn.init.zeros_,
        use_cpu_initialization=True,
        # Layers of different letters have different parameters; without this a checkpoint takes them for one stack.
        hetereogenous_dist_checkpoint=True,
        calculate_per_token_loss=True,
    )


PARTS = {"embedding": "embedding", "output_layer": "output", "mlp.": "mlp", "core.weights.": "memory"}
"""Part of a parameter's name -> the part of the model it belongs to."""


def count_parameters(model: nn.Module) -> dict[str, int]:
    """Parameters on this rank by part: embedding, mixers, memory (W_0 and what goes with it), mlp, norms, output."""
    counts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        counts[part_of(name)] += parameter.numel()
    return {**counts, "all": counts.total()}


def part_of(name: str) -> str:
    """The part of the model that a parameter's name belongs to."""
    for sign, part in PARTS.items():
        if sign in name:
            return part
    return "mixers" if "self_attention" in name else "norms"


def describe_parameters(model: nn.Module) -> str:
    """One line: "1,234,567 parameters: mixers 600,000, mlp ..."."""
    counts = count_parameters(model)
    total = counts.pop("all")
    parts = ", ".join(f"{part} {count:,}" for part, count in sorted(counts.items(), key=lambda item: -item[1]))
    return f"{total:,} parameters on this rank: {parts}"
