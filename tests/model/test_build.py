"""From a configuration to a model: sizes, precision, start values, weight decay."""

import pytest
import torch
from helpers.models import small_run

from miras_megatron.model.attention_slot import MixerSlot
from miras_megatron.model.build import block_spec, build_model, count_parameters, describe_parameters
from miras_megatron.model.initialise import decays
from miras_megatron.model.norm import RMSNorm
from miras_megatron.parallel.mesh import ParallelMesh


@pytest.fixture(scope="module")
def mesh():
    with ParallelMesh(device="cpu") as alone:
        yield alone


def test_the_blocks_sit_in_megatrons_layers(mesh):
    """The point of the project: core's layer, norm slots, MLP and embedding around our mixer."""
    from megatron.core.tensor_parallel import VocabParallelEmbedding
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.transformer_layer import TransformerLayer

    model = build_model(small_run("mcgwa"), mesh)
    for letter, layer in zip("mcgwa", model.decoder.layers, strict=True):
        assert isinstance(layer, TransformerLayer) and isinstance(layer.mlp, MLP)
        assert isinstance(layer.self_attention, MixerSlot) and layer.self_attention.letter == letter
        assert isinstance(layer.input_layernorm, RMSNorm) and isinstance(layer.pre_mlp_layernorm, RMSNorm)
    assert isinstance(model.embedding.word_embeddings, VocabParallelEmbedding)
    assert isinstance(model.decoder.final_layernorm, RMSNorm)


def test_bf16_is_for_projections_only(mesh):
    """A keep gate of 0.9999 is 1 in bf16: memories, gates and norms must stay in float32, and so must states."""
    model = build_model(small_run("mcgw", precision="bf16", gates="channel", gate_rank=4), mesh)
    for name, parameter in model.named_parameters():
        low = decays(parameter) or "word_embeddings" in name
        assert parameter.dtype == (torch.bfloat16 if low else torch.float32), name
    _, states = model(torch.zeros(1, 5, dtype=torch.int64), return_states=True)
    assert all(weight.dtype == torch.float32 for weight in states[1]["memory"].weights)


def test_only_matrices_of_projections_decay(mesh):
    """Decay pulls W_0 and gates to zero, which is not nothing: it is a memory that forgets at once."""
    model = build_model(small_run("mcgwa", tie_embeddings=False), mesh)
    kinds = {name.split("mixer.")[-1]: decays(p) for name, p in model.named_parameters()}
    decaying = {name for name, yes in kinds.items() if yes}
    assert {"core.query.weight", "core.key_value.weight", "out.weight", "output_layer.weight"} <= decaying
    spared = ("weights.", "gates.", "conv.", "norm", "persistent", "embedding", "bias")
    assert not [name for name in decaying if any(sign in name for sign in spared)]
    assert all(decays(p) for name, p in model.named_parameters() if "linear_fc" in name)


def test_the_start_is_that_of_the_rules(mesh):
    """Rules 12.5: 0.02, output projections over sqrt(2 L); layers and matrices are drawn apart, seeds too."""
    run = small_run("mm", hidden=64, ffn=256, init_std=0.02)
    model = build_model(run, mesh)
    weights = {name: p.detach() for name, p in model.named_parameters() if p.dim() == 2 and decays(p)}
    for name, weight in weights.items():
        expected = 0.02 / 2 if "linear_fc2" in name or name.endswith("out.weight") else 0.02
        assert abs(weight.std().item() / expected - 1) < 0.05, name
    flat = [weight.flatten()[:1000] / weight.std() for weight in weights.values()]
    overlap = torch.corrcoef(torch.stack(flat)).fill_diagonal_(0).abs().max()
    assert overlap < 0.2, "two matrices repeat each other's numbers"
    again = dict(build_model(run, mesh).named_parameters())
    other = dict(build_model(small_run("mm", hidden=64, ffn=256, init_std=0.02, seed=4), mesh).named_parameters())
    assert all(torch.equal(weight, again[name]) for name, weight in weights.items())
    assert not any(torch.equal(weight, other[name]) for name, weight in weights.items())


def test_parameters_are_counted_by_part(mesh):
    """The counts are printed at the start of every run and compared with the papers'."""
    model = build_model(small_run("mw", tie_embeddings=False), mesh)
    counts = count_parameters(model)
    assert counts.pop("all") == sum(counts.values()) == sum(p.numel() for p in model.parameters())
    assert counts["embedding"] == counts["output"] == 96 * 32 and counts["mlp"] == 2 * 3 * 32 * 48
    assert counts["norms"] == 5 * 32
    assert describe_parameters(model).startswith(f"{sum(counts.values()):,} parameters on this rank: mixers ")


def test_choices_reach_the_blocks():
    """A field that does not arrive is an ablation that was never run."""
    run = small_run("m", rule="yaad", depth=1, horizon_spread=2.0, conv=0, momentum_init=0.3, delta="constant")
    spec = block_spec(run)
    assert (spec.rule.name, spec.rule.depth, spec.horizon_spread, spec.conv) == ("yaad", 1, 2.0, 0)
    assert (spec.momentum_init, spec.delta, spec.horizon, spec.lr_max, spec.layers) == (0.3, "constant", 32.0, 0.1, 1)
    assert block_spec(small_run("m", horizon=7.0)).horizon == 7.0
    assert 0 < block_spec(small_run("m", lr_max=None)).lr_max < 1
