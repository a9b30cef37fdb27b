"""Memory as context against the paper's equations written out, one segment and one document at a time."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from helpers.layer_blocks import hidden_states, small_block, small_spec
from helpers.numerics import assert_close
from torch import Tensor, nn
from torch.nn.functional import conv1d, silu

from miras_megatron.layers.segments import plan_segments
from miras_megatron.memory import MemoryInputs, read_memory
from miras_megatron.memory.oracle import scan_memory


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def length_one(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def convolved(x: Tensor, weight: Tensor | None) -> Tensor:
    """[T, C] through the causal convolution and SiLU."""
    if weight is None:
        return silu(x)
    return silu(conv1d(x.T[None], weight[:, None], padding=3, groups=x.shape[1])[0, :, : len(x)].T)


def turned(x: Tensor, place: Tensor, base: float = 10000.0) -> Tensor:
    """[T, D] at places [T]."""
    half = x.shape[-1] // 2
    angle = place[:, None].double() * torch.tensor([base ** (-i / half) for i in range(half)], dtype=torch.float64)
    a, b = x[:, :half], x[:, half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def plain_mac(block: nn.Module, x: Tensor) -> Tensor:
    """One document [T, d]; the written stream is kept whole and convolved anew for every segment."""
    spec, core, attention = block.spec, block.core, block.attention
    n, d, rule = spec.heads, spec.head_dim, spec.rule
    asked = length_one(convolved(x @ core.query.weight.T, core.query_conv.weight).reshape(-1, n, d))
    state, written, out = core.start(1), x[:0], []
    for start in range(0, len(x), spec.segment):
        stop = min(len(x), start + spec.segment)
        s, p = x[start:stop], x[:0] if block.persistent is None else block.persistent
        queries = asked[start:stop]
        if block.memory_queries is not None:
            queries = length_one(block.memory_queries).transpose(0, 1)
        h = rms(read_memory(rule, core.params(), state, queries[None])[0], block.context_norm.weight).flatten(-2)
        rows = torch.cat([p, h, s])
        key, value = (rows @ attention.key_value.weight.T).reshape(-1, n, 2, d).unbind(2)
        query = (s @ attention.query.weight.T).reshape(-1, n, d)
        mixed = []
        for t in range(len(s)):
            seen = [*range(len(p)), *(len(p) + j for j in range(len(h)) if spec.memory_tokens or j <= t)]
            seen += [len(p) + len(h) + j for j in range(t + 1)]
            heads = []
            for i in range(n):
                place = torch.arange(len(s))
                keys = torch.cat([key[: len(p) + len(h), i], turned(key[len(p) + len(h) :, i], place)])[seen]
                scores = keys @ turned(query[t : t + 1, i], place[t : t + 1])[0] / math.sqrt(d)
                heads.append(scores.softmax(0) @ value[seen, i])
            mixed.append(torch.stack(heads))
        y = rms(torch.stack(mixed), block.attention_norm.weight)
        written = torch.cat([written, y.flatten(-2)])
        q = length_one(convolved(written @ core.query.weight.T, core.query_conv.weight).reshape(-1, n, d))
        kv = convolved(written @ core.key_value.weight.T, core.key_value_conv.weight).reshape(-1, n, 2, d)
        inputs = MemoryInputs(q[None], length_one(kv[None, :, :, 0]), kv[None, :, :, 1], **core.gates(written[None]))
        reads, state = scan_memory(rule, core.params(), inputs.tokens(start, stop), state, spec.chunk_size)
        out.append(y * torch.sigmoid(rms(reads[0], block.read_norm.weight)))
    return torch.cat(out).flatten(-2) @ block.out.weight.T


@pytest.mark.parametrize("changes", [{}, {"persistent_tokens": 3}, {"memory_tokens": 3}, {"conv": 0, "chunk_size": 16}])
@pytest.mark.parametrize("borders", [[0, 1], [0, 5], [0, 33], [0, 3, 19, 20]])
def test_equals_the_equations(changes: dict[str, int], borders: list[int]) -> None:
    """Lanes, groups and masks are bookkeeping: read, attend, write, gate is what is computed."""
    block = small_block("c", small_spec(**changes))
    x = hidden_states(2, borders[-1])
    with torch.no_grad():
        for end_states in (False, True):
            y, _ = block(x, cu_seqlens=[torch.tensor(borders), torch.tensor([0, borders[-1]])], return_state=end_states)
            for start, stop in pairwise(borders):
                assert_close(f"from {start}", y[0, start:stop], plain_mac(block, x[0, start:stop]), 1e-10)
        assert_close("the other row", y[1], plain_mac(block, x[1]), 1e-10)


def test_documents_run_side_by_side() -> None:
    """One row of eight short documents takes as many steps as the longest needs segments, not eight times that."""
    from miras_megatron.layers.documents import Documents

    cuts = torch.tensor([0, 16, 20, 36, 47, 61, 70, 86, 100])
    documents = Documents.of(cuts, 1, 100)
    plan = plan_segments(documents, 1, 100, 8, None, end_states=False)
    assert len(plan.groups) == 2
    assert sorted(plan.order[plan.back(100)].tolist()) == list(range(100))


def test_plan_meets_every_token_once_in_order() -> None:
    """A token left out or worked on before its past is silent nonsense."""
    from miras_megatron.layers.documents import Documents

    for end_states in (False, True):
        for places in (None, [0, 3, 7]):
            cuts = [torch.tensor([0, 1, 30]), torch.tensor([0, 13, 14, 30]), torch.tensor([0, 30])]
            plan = plan_segments(Documents.of(cuts, 3, 30), 3, 30, 8, places, end_states)
            met = [
                int(t)
                for group in plan.groups
                for tokens, real in zip(group.tokens, group.real, strict=True)
                for t in tokens[:real]
            ]
            assert sorted(met) == list(range(90))
            assert torch.equal(plan.order[plan.back(90)], torch.arange(90))
            for row in range(3):
                for lane in {lane for lane, r in enumerate(plan.rows) if r == row}:
                    mine = [
                        int(t)
                        for group in plan.groups
                        for number, tokens, real in zip(group.lanes, group.tokens, group.real, strict=True)
                        if number == lane
                        for t in tokens[:real]
                    ]
                    assert mine == list(range(mine[0], mine[0] + len(mine)))
