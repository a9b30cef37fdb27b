"""Parts of a tensor come together on one rank and go back to where they were."""

import torch
import torch.distributed as dist
from helpers.worlds import run_world

from miras_megatron.parallel.shares import collect_parts, deal_parts, is_own, keeper_of

HALVES = [(0, 5), (5, 10)]
CASES = ([(0, 10), (10, 10)], [(0, 0), (0, 10)], [(0, 3), (3, 10)], [(0, 7), (7, 10)], HALVES, HALVES)


def there_and_back():
    """On a rank: for each case, whether it kept the whole, and whether its own part came back."""
    whole, found = torch.arange(10.0), []
    for turn, spans in enumerate(CASES):
        start, end = spans[dist.get_rank()]
        part = whole[start:end].clone()
        kept = collect_parts(part, spans, dist.group.WORLD, (2, 5), turn=turn)
        assert kept is None or torch.equal(kept, whole.view(2, 5))
        assert kept is None or is_own(kept) == (kept.data_ptr() != part.data_ptr())  # else training changes it
        back = torch.full_like(part, -1)
        deal_parts(None if kept is None else kept.view(-1), back, spans, dist.group.WORLD, turn=turn)
        found.append((kept is not None, torch.equal(back, whole[start:end])))
    return found


def test_parts_come_together_and_go_back():
    """A weight that lies across a cut would else lose a piece of its moments at every save."""
    for turn, answers in enumerate(zip(*run_world(2, there_and_back), strict=True)):
        assert [kept for kept, _ in answers] == [rank == keeper_of(CASES[turn], turn) for rank in (0, 1)]
        assert all(back for _, back in answers)


def test_ranks_that_have_as_much_take_turns():
    """The first rank would else gather a whole model of ZeRO 3, which only fits in parts."""
    thirds = [(0, 4), (4, 8), (8, 10)]
    assert [keeper_of(thirds, turn) for turn in range(4)] == [0, 1, 0, 1]
    assert [keeper_of([(0, 3), (3, 10)], turn) for turn in range(3)] == [1, 1, 1]
