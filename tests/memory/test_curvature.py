"""The inner loop must not start out unstable: measured curvature against closed forms and every preset's rate."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize, silu

from miras_megatron.memory import make_rule
from miras_megatron.memory.curvature import chunk_curvature, stable_rate

HEADS = 3


def chunk_of_keys(size: int, width: int, parallel: bool) -> torch.Tensor:
    """Keys as the layer makes them: SiLU, then unit length; all the same where `parallel`."""
    noise = torch.randn(
        1 if parallel else size, HEADS, width, generator=torch.Generator().manual_seed(size), dtype=torch.float64
    )
    return normalize(silu(noise), dim=-1).expand(size, HEADS, width)


def test_a_plain_matrix_is_as_steep_as_its_keys_gram_matrix():
    """Otherwise the power iteration measures something else and every bound built on it is wrong."""
    rule = make_rule("titans_linear")
    params = rule.init_params(HEADS, 7, generator=torch.Generator().manual_seed(0))
    keys = chunk_of_keys(13, 7, parallel=False)
    gram = torch.einsum("cnd,cne->nde", keys.double(), keys.double())
    want = torch.linalg.eigvalsh(gram)[:, -1]
    torch.testing.assert_close(chunk_curvature(rule, params, keys, steps=200), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [1, 16, 64])
def test_parallel_keys_are_the_worst_case_of_a_plain_matrix(size):
    """Rules 1.10: unit keys give lambda <= C, reached where all keys are the same."""
    rule = make_rule("titans_linear")
    params = rule.init_params(HEADS, 8, generator=torch.Generator().manual_seed(0))
    parallel = chunk_curvature(rule, params, chunk_of_keys(size, 8, parallel=True))
    torch.testing.assert_close(parallel, torch.full_like(parallel, float(size)), rtol=1e-6, atol=0)
    assert (chunk_curvature(rule, params, chunk_of_keys(size, 8, parallel=False)) <= size + 1e-9).all()


def test_a_layer_norm_makes_a_deep_memory_far_steeper():
    """Rules 12.5 measured 3370 at dh 64, C 64: a rate chosen by the linear bound 2/C would be 50 times too large."""
    rule = make_rule("titans")
    params = rule.init_params(HEADS, 64, generator=torch.Generator().manual_seed(0))
    measured = chunk_curvature(rule, params, chunk_of_keys(64, 64, parallel=False))
    assert ((measured > 2000) & (measured < 6000)).all()
    assert stable_rate(float(measured.max()), momentum=0.5) < 0.5 / 64
