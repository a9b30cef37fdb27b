"""Ranks that share a row of an affine memory by composing summaries, against one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.layouts import Case, Reference, compare_layout, reference
from helpers.worlds import run_world

from miras_megatron.parallel import carry_scan
from miras_megatron.parallel.carry_scan import ScanCarry, ShareSummaries

TOKENS = 47
"""No multiple of the chunk (4) or of the ranks."""


def compare(case: Case, expected: Reference) -> dict[str, float]:
    """As `compare_layout`, and that states did cross by summaries."""
    shared: list[int] = []
    gather = carry_scan._gather

    def counted(own: torch.Tensor, group: Any) -> torch.Tensor:
        shared.append(own.numel())
        return gather(own, group)

    carry_scan._gather = counted
    try:
        differences = compare_layout(case, expected)
    finally:
        carry_scan._gather = gather
    memories = sum(letter in "mg" for letter in case.pattern)
    assert len(shared) == memories, f"{len(shared)} gathers for {memories} memories"
    return differences


@pytest.mark.parametrize(
    ("pattern", "changes", "ranks", "documents"),
    [
        ("mm", {"rule": "linear_attention"}, 2, "one"),
        ("mw", {"rule": "retnet"}, 2, "on"),
        ("mm", {"rule": "deltanet"}, 3, "before"),
        ("gm", {"rule": "gated_deltanet"}, 3, "after"),
        ("gm", {"rule": "gated_deltanet"}, 2, "far"),
        ("mg", {"rule": "titans_linear"}, 2, "before"),
        ("mg", {"rule": "titans_linear"}, 3, "one"),
        ("mm", {"rule": "titans_linear", "conv": 0}, 4, "far"),
        ("mm", {"rule": "ttt_linear", "options": {"layer_norm": False}}, 3, "on"),
        ("mm", {"rule": "swla"}, 3, "after"),
        ("mm", {"rule": "swla", "gates": "channel", "gate_rank": 4}, 2, "before"),
        ("mm", {"rule": "titans_linear", "options": {"window": 20}}, 3, "far"),
    ],
)
def test_ranks_are_one_process(pattern: str, changes: dict[str, Any], ranks: int, documents: str) -> None:
    """A summary of the wrong tokens, or a gradient that doesn't come back to its rank, trains another model.

    The window of 20 is longer than the slices: what it needs comes through the left neighbour.
    """
    layout = {"context": ranks, "carry": "scan"}
    case = Case(pattern, changes, layout, TOKENS, documents, one_target=ranks == 3)
    for rank, differences in enumerate(run_world(ranks, compare, case, reference(case))):
        worst = max(differences, key=differences.__getitem__)
        assert differences[worst] < 1e-9, f"rank {rank}: {worst}: {differences[worst]:.1e}"


def share(shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Summaries kept here and the gradient of the own one, with rank r's gradients all r + 1."""
    rank = dist.get_rank()
    own = torch.full(shape, float(rank), requires_grad=True)
    root, left = ShareSummaries.apply(torch.zeros((), requires_grad=True), own, rank, dist.group.WORLD)
    gradient = torch.autograd.grad([root, left], own, [root, torch.full_like(left, rank + 1.0)])[0]
    return [left.detach(), gradient]


def test_gradients_go_back_to_whom_the_summary_came_from() -> None:
    """Rank r has r summaries; what comes back is the sum over the ranks to the right."""
    for rank, (left, gradient) in enumerate(run_world(3, share, (2, 5))):
        assert left.tolist() == [[[float(r)] * 5] * 2 for r in range(rank)]
        assert gradient.tolist() == [[float(sum(r + 1 for r in range(rank + 1, 3)))] * 5] * 2


def test_other_scans_are_refused_by_name() -> None:
    """MAC attends inside its scan: a summary of its memory alone would be wrong."""
    carry = ScanCarry.__new__(ScanCarry)
    with pytest.raises(ValueError, match="letter c.*use 'relay'"):
        carry.run(lambda *_: None, None, None)
