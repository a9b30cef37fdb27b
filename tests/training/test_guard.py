"""The guard: a number that is none is found before the update, and the message says where to look."""

import pytest
import torch
from torch import nn

from miras_megatron.training.guard import all_finite, find_first, probed


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(3, 3)
        self.probe = None
        self.poison = False

    def forward(self, x):
        y = self.mix(x)
        if self.probe is not None:
            self.probe["state_norm"] = float("inf") if self.poison else 1.0
        return y * float("nan") if self.poison else y


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer(), Layer())


def test_the_first_layer_whose_output_is_wrong_is_named_with_its_inner_quantity(model):
    """Everything after the first wrong layer is wrong too: naming the last would send users astray."""
    model[1].poison = True
    found = find_first(model, lambda: model(torch.ones(2, 3)))
    assert (found.place, found.quantity) == ("1", "the output")
    assert found.details == ["1: state_norm is inf"]
    assert all(layer.probe is None for layer in model)


def test_a_gradient_is_named_where_every_output_is_fine(model):
    """The backward alone can overflow; the last wrong parameter is where it began."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    model[0].mix.weight.grad[0, 0] = float("nan")
    model[1].mix.bias.grad[0] = float("inf")
    found = find_first(model, lambda: model(torch.ones(2, 3)))
    assert str(found).startswith("the gradient of parameter bias of 1.mix\n  2 gradients are not finite")


def test_a_parameter_that_was_wrong_already_is_named_first(model):
    """A bad checkpoint or init must not be blamed on the layer that reads it."""
    with torch.no_grad():
        model[2].mix.weight[0, 0] = float("inf")
    assert find_first(model, lambda: model(torch.ones(2, 3))).quantity == "parameter weight"


def test_main_grad_is_looked_at_where_there_is_one(model):
    """megatron-core's DDP keeps gradients there, and `grad` is None."""
    for p in model.parameters():
        p.main_grad = torch.zeros_like(p)
    model[0].mix.bias.main_grad[0] = float("nan")
    assert find_first(model, lambda: model(torch.ones(2, 3))).place == "0.mix"


def test_nothing_is_said_where_nothing_is_wrong(model):
    """Another rank may be the one."""
    assert str(find_first(model, lambda: model(torch.ones(2, 3)))) == "nothing on this rank"


def test_probes_are_filled_inside_and_taken_away_after(model):
    """Left on, they would cost every step."""
    with probed(model) as probes:
        model(torch.ones(2, 3))
    assert probes == {"0": {"state_norm": 1.0}, "1": {"state_norm": 1.0}, "2": {"state_norm": 1.0}}
    assert model[0].probe is None


def test_finite_trees():
    """What is looked at where a step went wrong."""
    assert all_finite({"a": torch.ones(2), "b": (torch.tensor([1]), None)})
    assert not all_finite([torch.tensor([1.0, float("nan")])])
