"""Gates start where the configuration says, and come in the shapes the rules take."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.layer_blocks import hidden_states, small_spec
from helpers.numerics import assert_close

from miras_megatron.layers import PlainLinear
from miras_megatron.layers.gates import MemoryGates, horizons
from miras_megatron.memory import make_rule


def start_gates(**changes: object) -> dict[str, object]:
    """The gates of hidden states that say nothing."""
    gates = MemoryGates(small_spec(**changes), PlainLinear()).double()
    return gates(torch.zeros(2, 7, 16, dtype=torch.float64))


@pytest.mark.parametrize("horizon", [1.0, 30.0, 4096.0, 1e6])
def test_half_is_kept_after_the_horizon(horizon: float) -> None:
    """A gate that forgets sooner than its horizon retrieves nothing at 16 times the training length."""
    keep = start_gates(horizon=horizon)["log_keep"][0]
    assert_close("log of what is left", keep * horizon, torch.full_like(keep, -math.log(2.0)), 1e-5)


def test_horizons_are_geometric_over_heads() -> None:
    """Heads of different reach: from horizon / spread to horizon * spread."""
    spec = small_spec(heads=4, horizon=100.0, horizon_spread=8.0)
    assert_close("horizons", horizons(spec), torch.tensor([12.5, 50.0, 200.0, 800.0]).double(), 1e-12)
    keep = start_gates(heads=4, horizon=100.0, horizon_spread=8.0)["log_keep"][0]
    assert_close("keep", keep[0, 0].double(), -math.log(2.0) / horizons(spec), 1e-5)


def test_rates_momentum_delta_and_window_start_as_configured() -> None:
    """The inner learning rate's start decides whether the memory is stable from the first step."""
    gates = start_gates(lr_max=0.4, lr_init=0.25, momentum_init=0.1)
    assert_close("lr", gates["lr"][0], torch.full((2, 7, 2), 0.1).double(), 1e-6)
    assert_close("momentum", gates["momentum"][1], torch.full((2, 7, 2), 0.1).double(), 1e-6)
    delta = start_gates(rule="yaad", delta_init=1.5)["delta"]
    assert_close("delta", delta, torch.full((2, 7, 2), 1.5).double(), 1e-6)
    window = start_gates(rule="omeganet")["window"]
    assert_close("window weights sum to one", window.sum(-1), torch.ones(2, 7, 2).double(), 1e-6)
    both = start_gates(rule="swla")
    assert len(both["lr_prev"]) == 1 and both["lr_prev"][0].shape == (2, 7, 2)


def test_gates_stay_finite_far_from_zero() -> None:
    """The keep gate lives in log space: a closed one is a large negative number, never log(0)."""
    gates = MemoryGates(small_spec(), PlainLinear())
    out = gates(1e4 * hidden_states(2, 7).float())
    assert all(bool(part.isfinite().all()) for gate in out.values() for part in gate)
    assert float(out["log_keep"][0].detach().min()) < -10 and float(out["log_keep"][0].detach().max()) <= 0


def test_a_constant_delta_does_not_hear_the_input() -> None:
    """The ablation 'delta independent of input' must be one."""
    for delta, hears in (("input", True), ("constant", False)):
        gates = MemoryGates(small_spec("yaad", delta=delta), PlainLinear()).double()
        one, other = (gates(hidden_states(1, 5, seed=s))["delta"] for s in (0, 1))
        assert torch.equal(one, other) != hears
        assert gates.bias.requires_grad


@pytest.mark.parametrize(
    ("rule", "changes", "widths"),
    [
        ("titans", {}, [1, 1]),
        ("titans", {"gates_per_layer": False}, None),
        ("titans", {"gates": "channel"}, [8, 8]),
        ("titans", {"gates": "channel", "gates_per_layer": False}, "channel"),
        ("yaad", {"gates": "channel", "depth": 4}, [8, 1, 1, 8]),
        ("yaad", {"gates": "channel", "depth": 3, "gates_per_layer": False}, [8, 1, 8]),
        ("omeganet", {"gates": "channel", "degree": 2}, [1, 8]),
        ("gated_deltanet", {"gates": "channel"}, [8]),
    ],
)
def test_shapes(rule: str, changes: dict[str, object], widths: object) -> None:
    """A gate of the wrong width is refused by the scan, in the middle of a run."""
    rule_changes = {k: changes.pop(k) for k in ("depth", "degree") if k in changes}
    spec = small_spec(make_rule(rule, **rule_changes), gate_rank=3, **changes)
    lr = MemoryGates(spec, PlainLinear()).double()(hidden_states(2, 5))["lr"]
    if isinstance(widths, list):
        assert [1 if part.dim() == 3 else part.shape[-1] for part in lr] == widths
    else:
        assert lr.shape == ((2, 5, 2) if widths is None else (2, 5, 2, 8))
