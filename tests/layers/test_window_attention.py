"""Sliding-window and full attention against a masked softmax written out, one query after the other."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.layer_blocks import hidden_states, small_block, small_spec
from helpers.numerics import assert_close
from torch import Tensor, nn

import miras_megatron.layers.window_attention as window_attention
from miras_megatron.layers.rotary import rotary_table, rotate


def plain_attention(block: nn.Module, x: Tensor, window: int, borders: list[int], base: float = 10000.0) -> Tensor:
    """One row [T, d]: query t against its document's keys t-window+1 .. t, and unturned against persistent rows."""
    attention, heads = block.attention, []
    d, width = x.shape[-1], attention.width
    key_value = attention.key_value.weight.reshape(attention.heads, 2, width, d)
    frequency = torch.tensor([base ** (-i / width) for i in range(0, width, 2)], dtype=torch.float64)

    def turn(row: Tensor, place: int) -> Tensor:
        a, b = row[: width // 2], row[width // 2 :]
        cos, sin = torch.cos(place * frequency), torch.sin(place * frequency)
        return torch.cat([a * cos - b * sin, b * cos + a * sin])

    for h in range(attention.heads):
        query = x @ attention.query.weight[h * width : (h + 1) * width].T
        key, value = x @ key_value[h, 0].T, x @ key_value[h, 1].T
        rows = getattr(block, "persistent", None)
        rows = x[:0] if rows is None else rows
        out = []
        for start, stop in pairwise(borders):
            for t in range(start, stop):
                seen = range(max(start, t - window + 1), t + 1)
                turned = turn(query[t], t)
                scores = [query[t] @ (key_value[h, 0] @ p) for p in rows] + [turned @ turn(key[j], j) for j in seen]
                values = torch.stack([key_value[h, 1] @ p for p in rows] + [value[j] for j in seen])
                out.append(torch.softmax(torch.stack(scores) / math.sqrt(width), 0) @ values)
        heads.append(torch.stack(out))
    return torch.cat(heads, -1) @ block.out.weight.T


@pytest.mark.parametrize("tokens", [1, 2, 5, 33])
@pytest.mark.parametrize("window", [1, 2, 5, 64])
@pytest.mark.parametrize("persistent", [0, 3])
def test_window_equals_masked_softmax(tokens: int, window: int, persistent: int) -> None:
    """Blocks, masks and persistent channels are bookkeeping: what is computed is the paper's softmax."""
    block = small_block("w", small_spec(window=window, persistent_tokens=persistent))
    x, borders = hidden_states(2, tokens), [0, tokens] if tokens < 5 else [0, 1, 4, tokens]
    y, _ = block(x, cu_seqlens=torch.tensor(borders))
    for row in range(2):
        assert_close(f"row {row}", y[row], plain_attention(block, x[row], window, borders), 1e-11)


@pytest.mark.parametrize("borders", [[0, 1], [0, 33], [0, 1, 4, 20]])
def test_full_attention_equals_masked_softmax(borders: list[int]) -> None:
    """The Transformer++ baseline must be one."""
    block, x = small_block("a", small_spec()), hidden_states(2, borders[-1])
    y, _ = block(x, cu_seqlens=torch.tensor(borders))
    assert_close("row 0", y[0], plain_attention(block, x[0], 10**9, borders), 1e-11)


@pytest.mark.parametrize("letter", ["w", "g", "c"])
def test_cost_is_linear_in_length(letter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask or score of T x T would end every long run."""
    sizes: list[int] = []
    inner = window_attention.scaled_dot_product_attention

    def watched(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        sizes.append(q.shape[0] * q.shape[2] * k.shape[2])
        return inner(q, k, v, **options)

    monkeypatch.setattr(window_attention, "scaled_dot_product_attention", watched)
    block, seen = small_block(letter, small_spec(window=16, persistent_tokens=2)), []
    for tokens in (256, 1024):
        sizes.clear()
        with torch.no_grad():
            block(hidden_states(1, tokens))
        seen.append(sum(sizes))
    assert seen[1] < 4.2 * seen[0]
    assert seen[1] <= 1024 * (2 * 16 + 2)


def test_only_distances_matter_to_turned_keys() -> None:
    """Rotary positions: the score of two tokens hangs on their distance, also millions of tokens in."""
    q, k = torch.randn(2, 1, 1, 8, dtype=torch.float64)
    at = [0, 1, 1000, 2_000_000]
    scores = [
        (rotate(q, rotary_table(torch.tensor([p + 3]), 8, 1e4)) * rotate(k, rotary_table(torch.tensor([p]), 8, 1e4)))
        for p in at
    ]
    for score in scores[1:]:
        assert_close("score", score.sum(), scores[0].sum(), 1e-8, floor=1.0)
    near = rotate(k.float(), rotary_table(torch.tensor([2_000_000]), 8, 1e4)).double()
    assert_close("float32 far away", near, rotate(k, rotary_table(torch.tensor([2_000_000]), 8, 1e4)), 1e-6)


def test_full_attention_goes_on_from_rows_of_different_length() -> None:
    """Sessions of different length share a batch."""
    block, x = small_block("a", small_spec()), hidden_states(2, 700)
    with torch.no_grad():
        _, state = block(x[:, :90], cu_seqlens=[torch.tensor([0, 80, 90]), torch.tensor([0, 90])], return_state=True)
        y, _ = block(x[:, 90:], state=state)
        assert state["count"].tolist() == [10, 90]
        assert_close("short row", y[:1], block(x[:1, 80:])[0][:, 10:], 1e-11)
        assert_close("long row", y[1:], block(x[1:])[0][:, 90:], 1e-11)
