"""The depthwise convolution against torch's, its hand-written backward, its tails and document starts."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from helpers.numerics import assert_close
from torch.nn.functional import conv1d, silu

from miras_megatron.layers import PlainLinear
from miras_megatron.layers.documents import Documents, last_rows
from miras_megatron.layers.short_conv import ShortConv


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
