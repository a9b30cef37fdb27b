"""Parts of a tensor come together on one rank and go back to where they were."""

import torch
import torch.distributed as dist
from helpers.worlds import run_world

from miras_megatron.parallel.shares import collect_parts, deal_parts, keeper_of

CASES = ([(0, 10), (10, 10)], [(0, 0), (0, 10)], [(0, 3), (3, 10)], [(0, 7), (7, 10)], [(0, 5), (5, 10)])


def there_and_back():
    """On a rank: for each case, whether it kept the whole, and whether its own part came back."""
    whole, found = torch.arange(10.0), []
    for spans in CASES:
        start, end = spans[dist.get_rank()]
        part = whole[start:end].clone()
        kept = collect_parts(part, spans, dist.group.WORLD)
        assert kept is None or torch.equal(kept, whole)
        back = torch.full_like(part, -1)
        deal_parts(kept, back, spans, dist.group.WORLD)
        found.append((kept is not None, torch.equal(back, whole[start:end])))
    return found


def test_parts_come_together_and_go_back():
    """A weight that lies across a cut would else lose a piece of its moments at every save."""
    for case, answers in zip(CASES, zip(*run_world(2, there_and_back), strict=True), strict=True):
        assert [kept for kept, _ in answers] == [rank == keeper_of(case) for rank in (0, 1)]
        assert all(back for _, back in answers)
