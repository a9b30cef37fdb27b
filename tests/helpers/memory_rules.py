"""The rules that memory tests run over: every named one, every option of `Rule` at least once, random mixtures."""

from __future__ import annotations

import random
from typing import Any

from miras_megatron.memory import RULES, Rule, make_rule
from miras_megatron.memory.choices import EFFECTS, PRESETS, Choices

SMALL = {"expansion": 2}


def _options() -> dict[str, Rule]:
    """Every choice of every field away from its default, by a name that says which."""

    def titans(**choices: Any) -> Rule:
        return make_rule("titans", **(SMALL if choices.get("depth") != 1 else {}) | choices)

    def linear(**choices: Any) -> Rule:
        return make_rule("titans_linear", **choices)

    ftrl = {"retention": "elastic_net", "elastic_form": "ftrl", "keep": False, "momentum": False, "c1": 3.0}
    elastic = ftrl | {"elastic_form": "local", "c2": 2.0}
    return {
        "depth_1": titans(depth=1),
        "depth_3": titans(depth=3),
        "depth_4": titans(depth=4, expansion=1),
        "no_residual": titans(residual=False),
        "no_layer_norm": titans(layer_norm=False),
        "no_keep": titans(keep=False),
        "fixed_keep": titans(fixed_keep=True),
        "degree_2": titans(degree=2),
        "degree_3_matrix": linear(degree=3),
        "dot": titans(objective="dot"),
        "lp_1": titans(objective="lp", p=1.0),
        "lp_1.5": linear(objective="lp", p=1.5, sharpness=4.0),
        "lp_2": titans(objective="lp", p=2.0),
        "lp_3": titans(objective="lp", p=3.0),
        "huber_coordinate": titans(objective="huber_coordinate"),
        "huber_norm": titans(objective="huber_norm"),
        "huber_mixed": titans(objective="huber_mixed", sharpness=3.0),
        "value_shift": titans(objective="value_shift"),
        "lq_printed_token": make_rule("moneta", **SMALL, link_read="token"),
        "lq_exact_chunk": make_rule("moneta", **SMALL, link="exact_link"),
        "lq_exact_token": make_rule("moneta", **SMALL, link="exact_link", link_read="token", q=3.0),
        "lq_unit_chunk": make_rule("moneta", **SMALL, link="unit_norm"),
        "lq_unit_token": make_rule("moneta", **SMALL, link="unit_norm", link_read="token", q=1.5),
        "kl_exact": make_rule("memora", **SMALL, kl_form="exact"),
        "kl_exact_matrix": make_rule("memora", depth=1, kl_form="exact", gate_side="columns"),
        "kl_linear_no_keep": make_rule("memora", **SMALL, keep=False),
        "elastic_local_hard": titans(**elastic),
        "elastic_local_smooth": titans(**elastic, soft="smooth"),
        "elastic_ftrl_hard": titans(**ftrl),
        "elastic_ftrl_smooth": titans(**ftrl, soft="smooth"),
        "sigmoid": titans(retention="sigmoid", keep=False, momentum=False),
        "no_momentum": titans(momentum=False),
        "window_3_momentum": titans(window=3),
        "window_5": titans(window=5, momentum=False),
        "window_yaad": make_rule("yaad", **SMALL, window=3),
        "window_kl": make_rule("memora", **SMALL, window=2),
        "window_lq": make_rule("moneta", **SMALL, window=2),
        "window_elastic": titans(**elastic, window=2),
        "window_dot": make_rule("linear_attention", window=3),
        "two_rates_deep": titans(window=2, two_rates=True),
        "two_rates_no_momentum": titans(window=2, two_rates=True, momentum=False),
        "newton_schulz_chunk": titans(newton_schulz="chunk"),
        "newton_schulz_token": titans(newton_schulz="token"),
        "newton_schulz_exact": linear(newton_schulz="token", objective="dot"),
        "newton_schulz_window": titans(newton_schulz="token", window=2),
        "previous_keep": make_rule("deltanet", keep=True, init="fan_in"),
        "previous_columns": make_rule("deltanet", keep=True, gate_side="columns", init="fan_in"),
        "decayed_columns": make_rule("gated_deltanet", gate_side="columns", init="fan_in"),
        "decayed_residual": make_rule("gated_deltanet", residual=True, degree=2, init="fan_in"),
        "previous_rate_one": make_rule("deltanet", write_rate="one", init="fan_in"),
        "write_rate_one": make_rule("dla", **SMALL, write_rate="one"),
        "clamped": titans(max_gradient_norm=0.3),
        "clamped_window": titans(max_gradient_norm=0.3, window=2),
        "clamped_dot": make_rule("retnet", max_gradient_norm=0.5),
        "gate_columns": linear(gate_side="columns"),
        "gate_columns_l2_decay": linear(gate_side="columns", momentum=False),
        "init_wide_input": titans(init="wide_input"),
        "init_unit": titans(init="unit"),
        "init_zeros": linear(init="zeros"),
    }


OPTIONS = _options()
ALL_RULES = RULES | OPTIONS


def random_rules(count: int, seed: int) -> dict[str, Rule]:
    """`count` legal mixtures of choices, drawn field by field so that none is refused."""
    draw = random.Random(seed)
    return {f"mix_{i}": make_rule("titans", **_with_effect(_legal_choices(draw))) for i in range(count)}


def _with_effect(choices: dict[str, Any]) -> dict[str, Any]:
    """The drawn choices that change something beside the others."""
    drawn = Choices(name="titans", **PRESETS["titans"] | choices)
    return {name: value for name, value in choices.items() if EFFECTS[name].when(drawn)}


def _legal_choices(draw: random.Random) -> dict[str, Any]:
    retention = draw.choice(["decay", "decay", "decay", "lq", "kl", "elastic_net", "sigmoid"])
    choices: dict[str, Any] = {
        "depth": draw.choice([1, 1, 2, 2, 3, 4]),
        "expansion": draw.choice([1, 2, 3]),
        "residual": draw.random() < 0.5,
        "layer_norm": draw.random() < 0.5,
        "degree": draw.choice([1, 1, 1, 2]),
        "objective": draw.choice(["dot", "l2", "lp", "huber_coordinate", "huber_norm", "huber_mixed", "value_shift"]),
        "p": draw.choice([1.0, 1.5, 2.0, 3.0]),
        "retention": retention,
        "keep": retention in ("decay", "lq", "kl") and draw.random() < 0.8,
        "momentum": retention == "decay" and draw.random() < 0.6,
        "q": draw.choice([1.5, 2.0, 3.0, 4.0]),
        "link": draw.choice(["printed", "exact_link", "unit_norm"]),
        "link_read": draw.choice(["chunk", "token"]),
        "kl_form": draw.choice(["linear", "exact"]),
        "elastic_form": draw.choice(["local", "ftrl"]),
        "soft": draw.choice(["hard", "smooth"]),
        "window": draw.choice([1, 1, 2, 3]),
        "write_rate": "input",
        "max_gradient_norm": draw.choice([None, None, 0.5]),
        "gate_side": draw.choice(["rows", "columns"]),
    }
    if choices["momentum"]:
        choices["newton_schulz"] = draw.choice(["off", "off", "chunk", "token"])
    if choices["window"] == 2 and choices.get("newton_schulz", "off") == "off":
        choices["two_rates"] = draw.random() < 0.5
    return choices
