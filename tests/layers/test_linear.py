"""Heads shared by ranks are cut out of one model."""

from __future__ import annotations

import pytest
import torch
from helpers.layer_blocks import hidden_states, small_spec
from helpers.numerics import assert_close
from torch import Tensor, nn

from miras_megatron.layers import PlainLinear, build_block


class OneOfTwo(PlainLinear):
    """A factory's view from one of two ranks; sums and gathers are left to the test."""

    shards = 2

    def __init__(self, index: int):
        super().__init__(torch.Generator().manual_seed(5))
        self.index = index

    def make(self, in_features: int, out_features: int, *, split: str, std: float) -> nn.Module:
        full = super().make(in_features, out_features, split="replicated", std=std)
        dim = {"column": 0, "row": 1, "replicated": None}[split]
        if dim is not None:
            full.weight = nn.Parameter(full.weight.detach().chunk(2, dim)[self.index].clone())
        return full


@pytest.mark.parametrize("letter", ["m", "g", "w", "a"])
@pytest.mark.parametrize("gates", ["head", "channel"])
def test_two_ranks_of_heads_make_the_same_model(letter: str, gates: str) -> None:
    """Heads, their memories, gates and convolutions are cut out of one model: the ranks' parts sum to it."""
    spec = small_spec(heads=4, persistent_tokens=2, gates=gates, gate_rank=3)
    x = hidden_states(2, 19)
    whole = build_block(letter, spec, PlainLinear(torch.Generator().manual_seed(5)), 3).double()
    parts: list[Tensor] = [build_block(letter, spec, OneOfTwo(i), 3).double()(x)[0] for i in range(2)]
    assert_close("sum over ranks", parts[0] + parts[1], whole(x)[0], 1e-12)
