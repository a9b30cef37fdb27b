"""Long sequences at the edge of stability, in float32: 8,192 tokens, little forgetting, keys at random or all alike.

Public reports of these memories are full of NaN after thousands of tokens. Where the inner rate stays below the
measured 2 (1 - m) / lambda of a chunk of equal keys, the worst there is, the state must stay finite and small:
    ||W_T|| <= 2 ||W_0|| + 1.5 r sqrt(T D)
The last term is what T independent values of width D add up to when nothing pulls them back (linear attention).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.memory_rules import RULES
from torch import Tensor
from torch.nn.functional import normalize

from miras_megatron.memory import MemoryInputs, MemoryState, Rule, make_rule, scan_memory
from miras_megatron.memory.curvature import chunk_curvature, stable_rate

LENGTH, CHUNK, HEADS, WIDTH, MOMENTUM = 8192, 64, 2, 16, 0.5
DEPTHS = {f"titans_depth_{depth}": make_rule("titans", depth=depth) for depth in (1, 2, 3, 4)}
CASES = {name: rule for name, rule in (DEPTHS | RULES).items() if name != "titans"}
ORTHOGONAL_RATE = 0.01
"""NS5 writes matrices of norm about 1 whatever the gradient, so no curvature bounds their rate."""


def _largest_rate(rule: Rule, params: dict[str, Tensor], random: torch.Generator) -> float:
    """Just inside the bound for a chunk (a token, for exact rules) of keys that all point one way."""
    if rule.newton_schulz != "off":
        return ORTHOGONAL_RATE
    key = normalize(torch.randn(1, HEADS, WIDTH, generator=random), dim=-1)
    curvature = chunk_curvature(rule, params, key.expand(1 if rule.exact else CHUNK, HEADS, WIDTH))
    return 0.95 * stable_rate(float(curvature.max()), MOMENTUM if rule.momentum else 0.0) / rule.window


def _long_run(rule: Rule, keys: str, share: float = 1.0) -> tuple[MemoryInputs, Tensor, MemoryState, float]:
    random = torch.Generator().manual_seed(0)
    params = rule.init_params(HEADS, WIDTH, generator=random)
    rate = share * _largest_rate(rule, params, random)
    shape = (1, LENGTH, HEADS, WIDTH)
    k, q, v = (torch.randn(shape, generator=random) for _ in range(3))
    k = k[:, :1].expand(shape) if keys == "parallel" else k
    ones = torch.ones(shape[:3])
    gates: dict[str, Any] = {
        "log_keep": -1e-6 * ones,
        "momentum": MOMENTUM * ones,
        "lr": rate * ones,
        "lr_prev": rate * ones,
        "delta": ones,
        "window": ones[..., None].expand(*shape[:3], rule.window),
    }
    inputs = MemoryInputs(normalize(q, dim=-1), normalize(k, dim=-1), v, **{name: gates[name] for name in rule.gates})
    inputs = inputs.map(lambda x: x.clone().requires_grad_())
    reads, state = scan_memory(rule, params, inputs, rule.init_state(params, 1), CHUNK)
    return inputs, reads, state, _largest_norm(rule, params, rate)


def _largest_norm(rule: Rule, params: dict[str, Tensor], rate: float) -> float:
    start = max(float(w.norm()) for w in rule.start_weights(params))
    return 2 * start + 1.5 * rate * rule.window * math.sqrt(LENGTH * WIDTH)


def _cases() -> list[Any]:
    by_default = {("titans_depth_4", "parallel"), ("titans_linear", "random"), ("gated_deltanet", "parallel")}
    pairs = [(name, keys) for name in CASES for keys in ("random", "parallel")]
    return [pair if pair in by_default else pytest.param(*pair, marks=pytest.mark.full) for pair in pairs]


@pytest.mark.parametrize(("name", "keys"), _cases())
def test_long_runs_at_the_largest_rate_stay_small(name: str, keys: str) -> None:
    """A memory that blows up after thousands of tokens ruins a run that looked well for hours."""
    inputs, reads, state, bound = _long_run(CASES[name], keys)
    reads.square().mean().backward()
    assert bool(torch.isfinite(reads).all())
    for key, x in state.tensors().items():
        assert bool(torch.isfinite(x).all()), key
    for i, weight in enumerate(state.weights):
        assert float(weight.detach().norm()) <= bound, (
            f"matrix {i}: norm {float(weight.detach().norm()):.3g} > {bound:.3g}"
        )
    for gate in ("q", "k", "v", *CASES[name].gates):
        assert bool(torch.isfinite(getattr(inputs, gate).grad).all()), gate


def test_the_bound_is_a_bound() -> None:
    """A fifth above the edge the same run explodes: the rate above is the largest, not a timid one."""
    _, _, state, bound = _long_run(make_rule("titans_linear", momentum=False), "parallel", share=1.2 / 0.95)
    assert not float(state.weights[0].detach().norm()) <= bound
