"""How far the cheap forms of Memora and Moneta, which their presets use, are from the exact ones.

If these fail, docs/decisions/cheap_forms.md tells users of a distance that isn't there any more.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import normalize, silu

from miras_megatron.memory import MemoryInputs, Rule, make_rule, scan_memory

TOKENS, HEADS, WIDTH = 256, 4, 32
RATES = {("memora", 16): 7.8e-3, ("memora", 64): 2e-3, ("moneta", 16): 6.1e-5, ("moneta", 64): 1.5e-5}
"""The stability bounds (config.stability) at this width: the largest rates a run takes by itself."""
FORMS = {
    "memora": ({"kl_form": "linear"}, {"kl_form": "exact"}),
    "moneta": ({"link_read": "chunk"}, {"link_read": "token"}),
}


def distance(name: str, chunk_size: int, horizon: float) -> float:
    """Relative difference of the cheap form's reads from the exact ones, keys and values as a layer makes them."""
    random = torch.Generator().manual_seed(1)
    cheap, exact = (make_rule(name, expansion=2, **choices) for choices in FORMS[name])
    params = cheap.init_params(HEADS, WIDTH, generator=random, dtype=torch.float64)
    shape = (1, TOKENS, HEADS, WIDTH)
    q, k, v = (silu(torch.randn(shape, generator=random, dtype=torch.float64)) for _ in range(3))
    gate = torch.ones(shape[:3], dtype=torch.float64)
    inputs = MemoryInputs(
        normalize(q, dim=-1),
        normalize(k, dim=-1),
        v,
        log_keep=-math.log(2) / horizon * gate,
        lr=RATES[name, chunk_size] * gate,
    )

    def reads(rule: Rule) -> torch.Tensor:
        return scan_memory(rule, params, inputs, rule.init_state(params, 1), chunk_size)[0]

    want = reads(exact)
    return float((reads(cheap) - want).norm() / want.norm())


@pytest.mark.parametrize(
    ("name", "chunk_size", "horizon", "documented"),
    [
        ("memora", 16, 4096.0, 0.039),
        ("memora", 64, 4096.0, 0.026),
        ("memora", 16, math.inf, 0.033),
        ("memora", 64, math.inf, 0.015),
        ("moneta", 16, 4096.0, 3.3e-4),
        ("moneta", 64, 4096.0, 1.3e-3),
        ("moneta", 16, math.inf, 1.2e-5),
        ("moneta", 64, math.inf, 5.6e-6),
    ],
)
def test_the_distance_is_the_documented_one(name: str, chunk_size: int, horizon: float, documented: float) -> None:
    """Who takes a preset should know what its chunk form costs."""
    assert distance(name, chunk_size, horizon) == pytest.approx(documented, rel=0.1)
