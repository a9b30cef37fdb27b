"""The small parts: convolution, norms, documents, and heads shared by ranks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from helpers.layer_blocks import hidden_states, small_spec
from helpers.numerics import assert_close
from torch import Tensor, nn
from torch.nn.functional import conv1d, silu

from miras_megatron.layers import PlainLinear, build_block
from miras_megatron.layers.backends import pick_scan
from miras_megatron.layers.documents import Documents, last_rows
from miras_megatron.layers.short_conv import ShortConv
from miras_megatron.memory import make_rule, scan_memory


@pytest.mark.parametrize("tokens", [1, 2, 5, 63])
@pytest.mark.parametrize("taps", [1, 2, 4])
def test_convolution_equals_torch_and_goes_on_from_its_tail(tokens: int, taps: int) -> None:
    """Four shifted products are a convolution; its tail is what a stream needs to go on."""
    conv = ShortConv(6, taps, PlainLinear(), torch.Generator().manual_seed(0)).double()
    x = torch.randn(2, tokens, 6, dtype=torch.float64)
    want = silu(conv1d(x.transpose(1, 2), conv.weight[:, None], padding=taps - 1, groups=6)[..., :tokens])
    empty = x.new_zeros(2, taps - 1, 6)
    assert_close("one pass", conv(x, empty), want.transpose(1, 2), 1e-12)
    cut = tokens // 2
    tail = last_rows(empty, x[:, :cut], None)
    assert_close("second half", conv(x[:, cut:], tail), want.transpose(1, 2)[:, cut:], 1e-12)


def test_convolution_gradient_is_exact() -> None:
    """Its backward is written by hand."""
    conv = ShortConv(4, 4, PlainLinear(), torch.Generator().manual_seed(0)).double()
    x = torch.randn(2, 7, 4, dtype=torch.float64, requires_grad=True)
    context = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    documents = Documents.of([torch.tensor([0, 2, 3, 7]), torch.tensor([0, 6, 7])], 2, 7)
    assert documents is not None
    for place in (None, documents.place()):
        assert torch.autograd.gradcheck(lambda *a, p=place: conv(a[0], a[1], p), (x, context, conv.weight))


def test_convolution_starts_anew_at_documents() -> None:
    """Three tokens of the last document would leak into each."""
    conv = ShortConv(4, 4, PlainLinear(), torch.Generator().manual_seed(0)).double()
    x, borders = torch.randn(2, 12, 4, dtype=torch.float64), [0, 2, 3, 12]
    documents = Documents.of(torch.tensor(borders), 2, 12)
    assert documents is not None
    empty = x.new_zeros(2, 3, 4)
    y = conv(x, empty, documents.place())
    for start, stop in pairwise(borders):
        assert_close(f"from {start}", y[:, start:stop], conv(x[:, start:stop], empty), 1e-12)
    tail = last_rows(empty, x[:, :4], Documents.of(torch.tensor([0, 3, 4]), 2, 4))
    assert torch.equal(tail[:, :2], torch.zeros(2, 2, 4)) and torch.equal(tail[:, 2], x[:, 3])


def test_documents_are_checked_and_empty_ones_dropped() -> None:
    """Borders that miss tokens would silently join documents."""
    documents = Documents.of(torch.tensor([0, 0, 4, 4, 9, 9]), 1, 9)
    assert documents is not None and documents.starts == ((0, 4),)
    assert Documents.of(torch.tensor([0, 9]), 3, 9) is None
    for wrong in ([0, 5], [1, 9], [0, 6, 4, 9], []):
        with pytest.raises(ValueError, match="cu_seqlens"):
            Documents.of(torch.tensor(wrong), 1, 9)
    with pytest.raises(ValueError, match="2 rows for a batch of 3"):
        Documents.of([torch.tensor([0, 9])] * 2, 3, 9)


def test_scans_are_picked_by_name() -> None:
    """A misspelt backend must not silently run the slow one."""
    assert pick_scan(make_rule("titans")) is scan_memory
    with pytest.raises(ValueError, match="backend = 'tritn'"):
        pick_scan(make_rule("titans"), "tritn")


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
