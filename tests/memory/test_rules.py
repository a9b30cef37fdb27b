"""Rules as data: if these failed, a configuration that means nothing would train, or a right one be refused."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from helpers.memory_cases import Case, make_case
from helpers.memory_rules import ALL_RULES, random_rules

from miras_megatron.memory import RULES, is_affine, make_rule, scan_memory
from miras_megatron.memory.choices import ALWAYS, CHOICES, EFFECTS, PRESETS, Choices, combination_problems

ELASTIC = {"retention": "elastic_net", "keep": False, "momentum": False}

WRONG: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "objective": ("titans", {"objective": "l3"}, ("objective", "l3", "huber_norm")),
    "retention": ("titans", {"retention": "l2"}, ("retention", "l2", "elastic_net")),
    "gradient_at": ("titans", {"gradient_at": "token"}, ("gradient_at", "token", "previous")),
    "write_rate": ("titans", {"write_rate": "two"}, ("write_rate", "two", "input")),
    "link": ("moneta", {"link": "exact"}, ("link", "exact", "exact_link")),
    "link_read": ("moneta", {"link_read": "end"}, ("link_read", "end", "token")),
    "kl_form": ("memora", {"kl_form": "log"}, ("kl_form", "log", "exact")),
    "elastic_form": ("yaad", ELASTIC | {"elastic_form": "global"}, ("elastic_form", "global", "ftrl")),
    "soft": ("yaad", ELASTIC | {"soft": "tanh"}, ("soft", "tanh", "smooth")),
    "newton_schulz": ("atlas", {"newton_schulz": "on"}, ("newton_schulz", "on", "chunk")),
    "gate_side": ("titans_linear", {"gate_side": "keys"}, ("gate_side", "keys", "columns")),
    "init": ("titans", {"init": "xavier"}, ("init", "xavier", "fan_in")),
    "depth_0": ("titans", {"depth": 0}, ("depth", "0")),
    "depth_5": ("titans", {"depth": 5}, ("depth", "5")),
    "expansion": ("titans", {"expansion": 0}, ("expansion", "0")),
    "degree": ("titans", {"degree": 0}, ("degree", "0")),
    "window": ("titans", {"window": 0}, ("window", "0")),
    "p": ("moneta", {"p": 0.5}, ("p", "0.5")),
    "q": ("moneta", {"q": 1.0}, ("q", "1.0")),
    "c1": ("yaad", ELASTIC | {"c1": 0.0}, ("c1", "0.0")),
    "c2": ("yaad", ELASTIC | {"c2": -1.0}, ("c2", "-1.0")),
    "sharpness": ("yaad", {"sharpness": 0.0}, ("sharpness", "0.0")),
    "clamp": ("titans", {"max_gradient_norm": 0.0}, ("max_gradient_norm", "0.0")),
    "keep_elastic": ("yaad", {"retention": "elastic_net"}, ("keep", "elastic_net")),
    "keep_sigmoid": ("yaad", {"retention": "sigmoid"}, ("keep", "sigmoid")),
    "fixed_without_keep": ("retnet", {"keep": False}, ("fixed_keep", "keep")),
    "fixed_lq": ("moneta", {"fixed_keep": True}, ("fixed_keep", "lq")),
    "momentum_lq": ("moneta", {"momentum": True}, ("momentum", "lq")),
    "momentum_kl": ("memora", {"momentum": True}, ("momentum", "kl")),
    "momentum_elastic": ("yaad", ELASTIC | {"momentum": True}, ("momentum", "elastic_net")),
    "orthogonal_without_momentum": ("atlas", {"momentum": False}, ("newton_schulz", "momentum")),
    "rates_window": ("swla", {"window": 3}, ("two_rates", "window", "3")),
    "rates_one": ("swla", {"write_rate": "one"}, ("two_rates", "write_rate")),
    "rates_orthogonal": ("atlas", {"window": 2, "two_rates": True}, ("two_rates", "newton_schulz", "chunk")),
    "lq_from_zero": ("moneta", {"init": "zeros"}, ("lq", "init", "zeros")),
    "p_infinite": ("moneta", {"p": math.inf}, ("p", "inf", "finite")),
    "p_nan": ("moneta", {"p": math.nan}, ("p", "nan", "finite")),
    "q_infinite": ("moneta", {"q": math.inf}, ("q", "inf", "finite")),
    "q_nan": ("moneta", {"q": math.nan}, ("q", "nan", "finite")),
    "c1_nan": ("yaad", ELASTIC | {"c1": math.nan}, ("c1", "nan")),
    "c2_infinite": ("yaad", ELASTIC | {"c2": math.inf}, ("c2", "inf", "finite")),
    "sharpness_infinite": ("yaad", {"sharpness": math.inf}, ("sharpness", "inf", "finite")),
    "clamp_infinite": ("titans", {"max_gradient_norm": math.inf}, ("max_gradient_norm", "inf", "null")),
    "exact_depth": ("deltanet", {"depth": 2}, ("gradient_at", "depth", "2")),
    "exact_norm": ("deltanet", {"layer_norm": True}, ("gradient_at", "layer_norm")),
    "exact_objective": ("deltanet", {"objective": "lp"}, ("gradient_at", "objective", "lp")),
    "exact_retention": ("deltanet", {"retention": "lq"}, ("gradient_at", "retention", "lq")),
    "exact_momentum": ("deltanet", {"momentum": True}, ("gradient_at", "momentum")),
    "exact_window": ("deltanet", {"window": 2}, ("gradient_at", "window", "2")),
    "exact_clamp": ("gated_deltanet", {"max_gradient_norm": 1.0}, ("gradient_at", "max_gradient_norm")),
}


WITHOUT_EFFECT: dict[str, tuple[str, dict[str, Any], str]] = {
    "expansion": ("titans", {"depth": 1, "expansion": 2}, "expansion = 2: no effect with depth = 1"),
    "p": ("titans", {"p": 2.0}, "p = 2.0: no effect with objective = 'l2'"),
    "p_default": ("yaad", {"p": 3.0}, "p = 3.0: no effect with objective = 'huber_mixed'"),
    "sharpness": ("titans", {"sharpness": 4.0}, "sharpness = 4.0: no effect with objective = 'l2'"),
    "sharpness_l2": ("moneta", {"p": 2.0, "sharpness": 4.0}, "sharpness = 4.0: no effect with objective = 'lp', p"),
    "q": ("titans", {"q": 3.0}, "q = 3.0: no effect with retention = 'decay'"),
    "link": ("memora", {"link": "exact_link"}, "link = 'exact_link': no effect with retention = 'kl'"),
    "link_read": ("titans", {"link_read": "token"}, "link_read = 'token': no effect with retention = 'decay'"),
    "link_read_2": ("moneta", {"q": 2.0, "link_read": "token"}, "link_read = 'token': no effect with retention = 'lq'"),
    "kl_form": ("moneta", {"kl_form": "linear"}, "kl_form = 'linear': no effect with retention = 'lq'"),
    "elastic_form": ("titans", {"elastic_form": "ftrl"}, "elastic_form = 'ftrl': no effect with retention"),
    "c1": ("titans", {"c1": 3.0}, "c1 = 3.0: no effect with retention = 'decay'"),
    "c2": ("yaad", ELASTIC | {"elastic_form": "ftrl", "c2": 1.0}, "c2 = 1.0: no effect with retention = 'elastic_net'"),
    "soft": ("yaad", {"soft": "smooth"}, "soft = 'smooth': no effect with retention = 'decay'"),
    "soft_inf": ("yaad", ELASTIC | {"c1": math.inf, "soft": "smooth"}, "soft = 'smooth': no effect with retention"),
    "gate_side": ("titans", {"gate_side": "columns"}, "gate_side = 'columns': no effect with depth = 2"),
    "gate_side_gateless": ("retnet", {"gate_side": "rows"}, "gate_side = 'rows': no effect with depth = 1"),
    "gate_side_wide": ("titans_linear", {"degree": 2, "gate_side": "columns"}, "gate_side = 'columns': no effect"),
    "init": ("memora", {"init": "wide_input"}, "init = 'wide_input': no effect with retention = 'kl'"),
}


@pytest.mark.parametrize("case", WITHOUT_EFFECT)
def test_a_given_choice_without_effect_is_refused_with_the_way_out(case: str) -> None:
    """Otherwise somebody tunes a number that nothing reads, and reports what it did."""
    name, choices, words = WITHOUT_EFFECT[case]
    with pytest.raises(ValueError) as refused:
        make_rule(name, **choices)
    assert words in str(refused.value) and "leave it out, or set " in str(refused.value)


def test_every_choice_says_when_it_has_an_effect() -> None:
    """A new choice without an entry would be accepted everywhere; every entry that may refuse is refused above."""
    assert list(EFFECTS) == [f.name for f in fields(Choices) if f.name != "name"]
    may_refuse = {name for name, effect in EFFECTS.items() if effect is not ALWAYS}
    assert may_refuse == {line.partition(" = ")[0] for _, _, line in WITHOUT_EFFECT.values()}


@pytest.mark.parametrize("name", ALL_RULES)
def test_a_choice_said_to_have_no_effect_has_none(name: str) -> None:
    """The table must not refuse what would have computed something else."""
    rule = ALL_RULES[name]
    others = {"expansion": 3, "p": 1.5, "sharpness": 2.0, "q": 1.7, "c1": 0.5, "c2": 0.3}
    others |= {field: CHOICES[field][-1] for field in ("link", "link_read", "kl_form", "elastic_form", "soft")}
    idle = {field: value for field, value in others.items() if not EFFECTS[field].when(rule)}
    case = make_case(rule, 7, 3, batch=1, heads=1, head_dim=3)
    changed = replace(case, rule=replace(rule, **idle))
    assert idle and all(torch.equal(got, want) for got, want in zip(_results(changed), _results(case), strict=True))


def _results(case: Case) -> list[torch.Tensor]:
    reads, state = scan_memory(case.rule, case.params, case.inputs, case.state, 3)
    return [reads, *state.tensors().values()]


@pytest.mark.parametrize("name", RULES)
def test_defaults_and_presets_are_never_refused(name: str) -> None:
    """A named rule is legal, also written out in full; and no choice that nobody gave is held against them."""
    assert make_rule(name, **PRESETS[name]) == RULES[name]
    for changes in ({"depth": 1}, {"retention": "decay"}, {"objective": "l2"}, {"keep": False}):
        if not combination_problems(Choices(name=name, **PRESETS[name] | changes)):
            make_rule(name, **changes)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_combination_is_refused_by_name(wrong: str) -> None:
    """Otherwise a run would compute something nobody asked for and never say so."""
    name, choices, words = WRONG[wrong]
    with pytest.raises(ValueError) as refused:
        make_rule(name, **choices)
    for word in (name, *words):
        assert word in str(refused.value), f"{word!r} isn't named in: {refused.value}"


def test_every_problem_is_told_at_once() -> None:
    """Otherwise a user mends a configuration one error a start."""
    with pytest.raises(ValueError) as refused:
        make_rule("deltanet", depth=2, layer_norm=True, window=3, p=2.0, link="printed")
    assert str(refused.value).count("\n") == 5
    with pytest.raises(ValueError) as refused:
        make_rule("deltanet", dept=2, layer_norm="no", window=0, p=0.1, link="exact")
    assert str(refused.value).count("\n") == 5


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    """Otherwise a misspelt rule or option would be a KeyError far from its cause, or silently ignored."""
    with pytest.raises(ValueError, match=r"'titan'.*titans.*memora"):
        make_rule("titan")
    with pytest.raises(ValueError, match=r"titans(.|\n)*dept: unknown .* depth(.|\n)*momentun: unknown .* momentum"):
        make_rule("titans", dept=2, momentun=False)


def test_values_of_another_type_are_refused_all_at_once() -> None:
    """memory.options of a YAML file come here unchecked: half a window would crash far away, "3" at once."""
    wrong: dict[str, Any] = {"depth": True, "window": 1.5, "p": "3", "keep": 1, "init": None, "max_gradient_norm": "1"}
    with pytest.raises(ValueError) as refused:
        make_rule("titans", **wrong)
    for name, value in wrong.items():
        assert f"{name} = {value!r}: must be " in str(refused.value)


@pytest.mark.parametrize("name", RULES)
def test_named_rules_are_their_own_names(name: str) -> None:
    """The registry is how configurations and checkpoints name a rule."""
    assert RULES[name].name == name
    assert make_rule(name) == RULES[name]


@pytest.mark.parametrize("name", ALL_RULES)
def test_params_and_state_fit_the_shapes(name: str) -> None:
    """Tensor parallelism and checkpoints cut params by these shapes: heads first, one matrix a layer."""
    rule, heads, width, batch = ALL_RULES[name], 3, 5, 2
    params = rule.init_params(heads, width)
    state = rule.init_state(params, batch)
    assert {name: tuple(p.shape) for name, p in params.items()} == rule.param_shapes(heads, width)
    assert all(p.shape[0] == heads for p in params.values())
    assert set(rule.fixed_params) <= set(params)
    for i, shape in enumerate(rule.shapes(width)):
        assert params[f"weight_{i}"].shape == (heads, *shape)
        assert state.weights[i].shape == (batch, heads, *shape)
    assert state.phase.tolist() == [0] * batch
    assert len(state.anchor) == (0 if rule.exact else rule.depth)
    assert len(state.tail) == (0 if rule.window == 1 else 3 if "delta" in rule.gates else 2)
    assert len(state.momentum) == (rule.depth if rule.momentum or rule.is_ftrl else 0)


def test_shapes_of_deep_and_polynomial_memories() -> None:
    """A memory of the wrong width would still run."""
    assert make_rule("titans").shapes(8) == [(32, 8), (8, 32)]
    assert make_rule("titans", depth=4, expansion=2).shapes(8) == [(16, 8), (16, 16), (16, 16), (8, 16)]
    assert make_rule("omeganet", degree=2).shapes(8) == [(32, math.comb(10, 2)), (8, 32)]
    assert make_rule("titans_linear", degree=3).shapes(4) == [(4, math.comb(7, 3))]


def test_memora_starts_on_its_simplex() -> None:
    """Rows of W_0 must sum to c = fan_in, whichever variable the state keeps."""
    for form in ("linear", "exact"):
        rule = make_rule("memora", kl_form=form)
        params = rule.init_params(2, 4, dtype=torch.float64)
        for weight, fan_in in zip(rule.start_weights(params), (4, 16), strict=True):
            dense = weight.exp() if form == "exact" else weight
            torch.testing.assert_close(dense.sum(-1), torch.full_like(dense[..., 0], fan_in))


def test_retnet_keeps_its_published_constants() -> None:
    """Heads forget at 1 - 2^(-5-h); anything else is another model under the same name."""
    params = make_rule("retnet").init_params(3, 4, dtype=torch.float64)
    torch.testing.assert_close(params["log_keep"].exp(), 1 - 2.0 ** -torch.tensor([5.0, 6.0, 7.0], dtype=torch.float64))


def test_a_state_is_at_least_float32() -> None:
    """bf16 params must not make a bf16 state, whose small writes round away."""
    rule = make_rule("titans")
    state = rule.init_state(rule.init_params(2, 4, dtype=torch.bfloat16), 1)
    assert {x.dtype for x in (*state.weights, *state.momentum, *state.anchor)} == {torch.float32}


def test_gates_a_rule_asks_for() -> None:
    """The layers make exactly these gates."""
    assert make_rule("titans").gates == ("log_keep", "momentum", "lr")
    assert make_rule("yaad").gates == ("log_keep", "lr", "delta")
    assert make_rule("swla").gates == ("log_keep", "lr", "lr_prev")
    assert make_rule("atlas").gates == ("log_keep", "momentum", "lr", "window")
    assert make_rule("retnet").gates == ()


def test_exact_rules_are_the_published_ones() -> None:
    """Their chunk is a tile: a checkpoint may be run with any chunk size."""
    exact = {name for name, rule in RULES.items() if rule.exact}
    assert exact == {"linear_attention", "retnet", "deltanet", "gated_deltanet", "swla"}


def test_affine_rules_are_those_whose_update_is_linear_in_the_state() -> None:
    """Context parallelism by a prefix scan is only right for these."""
    affine = {name for name, rule in RULES.items() if is_affine(rule)}
    exact = {"linear_attention", "retnet", "deltanet", "gated_deltanet", "swla"}
    assert affine == exact | {"titans_linear"}
    assert not is_affine(make_rule("titans_linear"), channel_rows=True)
    assert is_affine(make_rule("swla"), channel_rows=True)


def test_random_mixtures_are_legal() -> None:
    """The mixtures that the scans are compared on must build, or the comparison would shrink unseen."""
    assert len(random_rules(60, seed=0)) == 60
