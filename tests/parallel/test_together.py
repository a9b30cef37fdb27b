"""Small answers that every rank needs alike: if ranks disagreed, one would wait where no other comes."""

import math

import torch.distributed as dist
from helpers.worlds import run_world

from miras_megatron.config.schema import Parallel
from miras_megatron.parallel.mesh import ParallelMesh
from miras_megatron.parallel.together import agreed


def numbers_of(values):
    """What ranks agree on where rank n has values[n]."""
    with ParallelMesh(Parallel(), device="cpu") as mesh:
        return agreed(mesh, *values[dist.get_rank()])


def test_all_take_the_numbers_of_rank_0():
    """A verdict that hangs on the last bit of a loss must be one verdict."""
    assert run_world(2, numbers_of, [(1.0, 2.0), (1.0 + 2**-52, 2.0)]) == [[1.0, 2.0]] * 2


def test_a_number_that_is_none_on_any_rank_is_none_on_all():
    """Rank 0 alone may have had luck."""
    for first, norm in run_world(2, numbers_of, [(1.0, 2.0), (math.nan, 2.0)]):
        assert math.isnan(first) and norm == 2.0
