"""What is written down twice, here and in the files that go with an export, says the same on both sides."""

import ast

import pytest
import torch
from helpers.models import small_run
from miras_tools import hf_config
from miras_tools.hf_code import CLASSES
from miras_tools.hf_names import to_hf, to_ours
from miras_tools.hf_shapes import weight_dtypes, weight_shapes

from miras_megatron.model.build import build_model
from miras_megatron.parallel.mesh import ParallelMesh


@pytest.mark.parametrize("tied", [True, False])
def test_every_weight_goes_there_and_back(tied):
    """A name that isn't its own way back loads another tensor, or none."""
    names = list(weight_shapes(small_run("mcgwa", tie_embeddings=tied)))
    assert [to_ours(to_hf(name)) for name in names] == names
    assert len({to_hf(name) for name in names}) == len(names)


def test_layers_keep_their_number():
    """Layer 12 isn't layer 1 with a 2 somewhere."""
    assert to_hf("decoder.layers.12.mlp.linear_fc1.weight") == "model.layers.12.mlp.gate_up.weight"
    assert to_ours("model.layers.12.mixer.core.gates.bias") == "decoder.layers.12.self_attention.mixer.core.gates.bias"


@pytest.mark.parametrize("name", ["decoder.layers.0.adapter.weight", "optimizer.exp_avg.output_layer.weight", ""])
def test_an_unknown_name_is_refused(name):
    """A tensor silently left out makes a model that babbles."""
    with pytest.raises(ValueError, match="no checkpoint of this version"):
        to_hf(name)


def constant(file, name):
    """A constant of a module that only transformers can import."""
    tree = ast.parse((CLASSES / file).read_text(encoding="utf-8"))
    (node,) = [x for x in tree.body if isinstance(x, ast.Assign) and getattr(x.targets[0], "id", "") == name]
    return eval(compile(ast.Expression(node.value), file, "eval"), {})


def test_reader_and_writer_mean_the_same_format():
    """One raised without the other: exports that nobody loads, or that older code misreads."""
    assert constant("configuration_miras.py", "FORMAT") == hf_config.FORMAT


@pytest.mark.parametrize("changes", [{}, {"gates": "channel", "gate_rank": 4, "memory_tokens": 2, "rule": "yaad"}])
def test_what_training_keeps_wide_is_wide_everywhere(changes):
    """In bf16 a memory's steps are rounded away, whether transformers loads it so or an import writes it so."""
    run = small_run("mcgwa", precision="bf16", tie_embeddings=False, **changes)
    with ParallelMesh(device="cpu") as mesh:
        trained = {name: p.dtype for name, p in build_model(run, mesh).named_parameters()}
    assert set(trained.values()) == {torch.bfloat16, torch.float32}
    assert weight_dtypes(run) == trained
    wide = constant("modeling_miras.py", "WIDE")
    assert {name: bool(wide & set(to_hf(name).split("."))) for name in trained} == {
        name: dtype == torch.float32 for name, dtype in trained.items()
    }
    assert set(weight_dtypes(small_run("mcgwa")).values()) == {torch.float32}
