"""The table of names: what is exported under one name comes back under the same."""

import pytest
from helpers.models import small_run
from miras_tools.hf_names import to_hf, to_ours
from miras_tools.hf_shapes import weight_shapes


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
