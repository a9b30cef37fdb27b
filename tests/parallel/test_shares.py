"""Parts of a tensor come together on one rank and go back to where they were."""

import pytest
import torch
import torch.distributed as dist
from helpers.worlds import run_world

from miras_megatron.parallel.shares import collect_parts, deal_parts, is_own, keepers_of, room_for

HALVES = [(0, 5), (5, 10)]
CASES = ([(0, 10), (10, 10)], [(0, 0), (0, 10)], [(0, 3), (3, 10)], [(0, 7), (7, 10)], HALVES, HALVES)


def there_and_back(device="cpu"):
    """On a rank: for each case, whether it kept the whole, and whether its own part came back."""
    whole, found = torch.arange(10.0), []
    for spans, keeper in zip(CASES, keepers_of(CASES), strict=True):
        start, end = spans[dist.get_rank()]
        part, way = whole[start:end].clone(), {"keeper": keeper, "device": torch.device(device)}
        kept = collect_parts(part, spans, dist.group.WORLD, (2, 5), **way)
        assert kept is None or torch.equal(kept, whole.view(2, 5))
        assert kept is None or is_own(kept) == (kept.data_ptr() != part.data_ptr())  # else training changes it
        room = room_for(part, spans, dist.group.WORLD, (2, 5), keeper)
        assert (room is None) == (kept is None) and (room is None or room.shape == (2, 5))
        back = torch.full_like(part, -1)
        deal_parts(kept, back, spans, dist.group.WORLD, **way)
        found.append((kept is not None, torch.equal(back, whole[start:end])))
    return found


def check(answers):
    keepers = keepers_of(CASES)
    for case, of_ranks in enumerate(zip(*answers, strict=True)):
        assert [kept for kept, _ in of_ranks] == [rank == keepers[case] for rank in (0, 1)]
        assert all(back for _, back in of_ranks)


def test_parts_come_together_and_go_back():
    """A weight that lies across a cut would else lose a piece of its moments at every save."""
    check(run_world(2, there_and_back))


@pytest.mark.multi_gpu(2)
def test_parts_in_host_memory_go_through_gpus():
    """What is offloaded lies on the host, which a group of GPUs sends nothing of."""
    check(run_world(2, there_and_back, "cuda", backend="nccl"))


def test_of_ranks_that_have_as_much_the_one_with_least_keeps():
    """The first rank would else gather a whole model of ZeRO 3, which only fits in parts."""
    halves, small = [(0, 50), (50, 100)], [(0, 5), (5, 10)]
    assert keepers_of([halves, small, small, small, halves]) == [0, 1, 1, 1, 1]
    assert keepers_of([[(0, 4), (4, 8), (8, 10)]] * 4) == [0, 1, 0, 1]
    assert keepers_of([[(0, 3), (3, 10)]] * 3) == [1, 1, 1]
