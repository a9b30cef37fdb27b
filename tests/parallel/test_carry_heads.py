"""Ranks that share a row by trading their tokens for heads, against one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.layouts import Case, Reference, compare_layout, reference
from helpers.worlds import run_world

from miras_megatron.layers.memory_core import HeadScan
from miras_megatron.parallel.carry_heads import HeadsCarry, Trade
from miras_megatron.parallel.carry_relay import Passage
from miras_megatron.parallel.cut import Cut
from miras_megatron.parallel.exchange import StateRing

TOKENS = 47
"""No multiple of the chunk (4) or of the ranks: slices differ in length."""
THREE = {"heads": 3, "hidden": 24}
FOUR = {"heads": 4}


def compare(case: Case, expected: Reference) -> dict[str, float]:
    """As `compare_layout`, and that tokens were traded for heads."""
    traded: list[int] = []
    exchange = Trade._exchange

    def counted(self: Trade, *args: Any) -> None:
        traded.append(self.rank)
        exchange(self, *args)

    Trade._exchange = counted  # type: ignore[method-assign]
    try:
        differences = compare_layout(case, expected)
    finally:
        Trade._exchange = exchange  # type: ignore[method-assign]
    memories = sum(letter in "mg" for letter in case.pattern)
    assert len(traded) == 4 * memories, f"{len(traded)} exchanges for {memories} memories"
    return differences


@pytest.mark.parametrize(
    ("pattern", "changes", "layout", "documents"),
    [
        ("mm", {"rule": "titans", **FOUR}, {"context": 2}, "one"),
        ("gw", {"rule": "titans", **FOUR}, {"context": 4}, "far"),
        ("mg", {"rule": "yaad", **THREE}, {"context": 3}, "before"),
        ("gm", {"rule": "yaad", **FOUR}, {"context": 2}, "after"),
        ("mm", {"rule": "moneta", **THREE}, {"context": 3}, "on"),
        ("mm", {"rule": "moneta", **FOUR}, {"context": 2, "tensor": 2}, "far"),
        ("mm", {"rule": "atlas", **FOUR}, {"context": 2}, "before"),
        ("mm", {"rule": "omeganet", "gates": "channel", "gate_rank": 4, "conv": 0, **THREE}, {"context": 3}, "after"),
        ("mw", {"rule": "gated_deltanet", **FOUR}, {"context": 2}, "on"),
    ],
)
def test_ranks_are_one_process(pattern: str, changes: dict[str, Any], layout: dict[str, Any], documents: str) -> None:
    """A head scanned with another's parameters, or tokens out of order, trains another model."""
    case = Case(pattern, changes, {**layout, "carry": "heads"}, TOKENS, documents)
    for rank, differences in enumerate(run_world(case.ranks, compare, case, reference(case))):
        worst = max(differences, key=differences.__getitem__)
        assert differences[worst] < 1e-9, f"rank {rank}: {worst}: {differences[worst]:.1e}"


def trade(lengths: list[int]) -> bool:
    """Whether what was traded stands where it should, and comes back as it was."""
    rank, heads = dist.get_rank(), 2 * len(lengths)
    whole = torch.arange(2 * sum(lengths) * heads * 3.0).view(2, sum(lengths), heads, 3)
    start = sum(lengths[:rank])
    here, deal = whole[:, start : start + lengths[rank]], Trade(rank, lengths, dist.group.WORLD)
    traded = deal.to_heads(here)
    return torch.equal(traded, whole[:, :, 2 * rank : 2 * rank + 2]) and torch.equal(deal.to_tokens(traded), here)


def test_tokens_and_heads_change_places() -> None:
    """Slices of unequal lengths."""
    assert all(run_world(3, trade, [4, 1, 6]))


def test_heads_that_ranks_cannot_share_are_refused() -> None:
    """Otherwise some rank would scan a head that is not there."""
    passage = Passage(StateRing([0, 1], 0), 1, 0, 2, [0, 0], cut=Cut.even(8, 2, 2))
    carry = HeadsCarry(passage, 1)
    with pytest.raises(ValueError, match="3 heads here can't be shared by 2 ranks"):
        carry.run(HeadScan.__new__(HeadScan), None, None, None, 3)


def test_other_scans_are_refused_by_name() -> None:
    """MAC's attention mixes heads inside its scan."""
    carry = HeadsCarry.__new__(HeadsCarry)
    with pytest.raises(ValueError, match="letter c.*use 'relay'"):
        carry.run(lambda *_: None, None, None)
