"""Pieces of a sequence on one rank: the same gradients as in one go, once a parameter, whatever is kept between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.models import random_tokens, small_run

from miras_megatron.compat.cpu import core_without_cuda
from miras_megatron.model.build import build_model
from miras_megatron.model.language_model import MemoryLanguageModel
from miras_megatron.parallel.exchange import StateRing
from miras_megatron.parallel.mesh import ParallelMesh
from miras_megatron.parallel.pieces import Relay
from miras_megatron.training.loss import summed_loss

TOKENS = 47


def loss_of(model: MemoryLanguageModel) -> torch.Tensor:
    """Two rows of several documents, a fifth of the targets masked."""
    tokens = random_tokens(2, TOKENS + 1)
    mask = (torch.arange(TOKENS) % 5 > 0).expand(2, -1)
    borders = [torch.tensor([0, 7, 15, 16, 40, TOKENS]), torch.tensor([0, 31, TOKENS])]
    total, count = summed_loss(model(tokens[:, :-1], tokens[:, 1:], mask, borders), mask)
    return total / count


@pytest.mark.parametrize("pattern", ["mcgw", "m"])
@pytest.mark.parametrize(
    "changes",
    [
        {"per_rank": 1},
        {"per_rank": 2, "head_groups": 2},
        {"per_rank": 3, "keep_last": False},
        {"per_rank": 5, "every": 2},
        {"per_rank": 7, "every": 3, "keep_last": False},
        {"per_rank": 4, "kept_in": "host"},
    ],
)
def test_pieces_are_one_sequence(pattern: str, changes: dict[str, Any]) -> None:
    """Nothing is truncated: the last loss still teaches the first write. float64, every parameter, each hook once."""
    with core_without_cuda(), ParallelMesh(device="cpu") as mesh:
        model = build_model(small_run(pattern), mesh).double()
        expected = loss_of(model)
        expected.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        calls: dict[str, int] = {}
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, n=name: calls.__setitem__(n, calls.get(n, 0) + 1))
        ring = StateRing([0], 0)
        model.relay = Relay(ring, **changes)
        loss = loss_of(model)
        loss.backward()
        ring.finish()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        torch.testing.assert_close(p.grad, gradients[name], rtol=1e-9, atol=1e-12, msg=name)
    assert set(calls.values()) == {1}, "a hook saw a gradient in parts: reductions that count calls would go wrong"


def test_nothing_of_a_piece_is_kept_but_what_it_received() -> None:
    """Memory that grows with the sequence by more than states would end at the first long one."""
    kept: list[int] = []
    with core_without_cuda(), ParallelMesh(device="cpu") as mesh:
        model = build_model(small_run("mm"), mesh)
        for pieces in (2, 8):
            model.relay = Relay(StateRing([0], 0), per_rank=pieces, keep_last=False)
            sizes: list[int] = []

            def keep(x: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
                sizes.append(x.numel() * x.element_size())
                return x

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                loss_of(model)
            kept.append(sum(sizes))
    assert kept[1] <= kept[0] + 1024, f"the graph keeps {kept[0]} bytes with 2 pieces, {kept[1]} with 8"


def test_without_gradients_pieces_are_one_sequence() -> None:
    """Validation under context parallelism takes this path."""
    with core_without_cuda(), ParallelMesh(device="cpu") as mesh, torch.no_grad():
        model = build_model(small_run("mcgw"), mesh).double()
        expected = loss_of(model)
        model.relay = Relay(StateRing([0], 0), per_rank=4, every=2)
        torch.testing.assert_close(loss_of(model), expected, rtol=1e-12, atol=0)
