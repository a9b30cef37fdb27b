"""The helper that every multi-rank test rests on."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from helpers.worlds import run_world


def add_ranks(x):
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return os.getpid(), total.item() + x


def fail_on_one():
    if dist.get_rank() == 1:
        raise ValueError("the cause")
    dist.barrier()


def sleep_on_one():
    time.sleep(30 if dist.get_rank() == 0 else 0)


def _gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_results_failures_deadlines_and_orphans():
    """A hang here would hide every other failure, and a rank left behind would eat the machine."""
    first = run_world(2, add_ranks, 5)
    assert [total for _, total in first] == [6.0, 6.0]
    assert run_world(2, add_ranks, 0)[0][0] == first[0][0], "ranks are kept between calls"
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"failed on(.|\n)*rank 1(.|\n)*the cause"):
        run_world(2, fail_on_one)
    assert time.monotonic() - start < 20
    assert all(_gone(pid) for pid, _ in first)
    pids = [pid for pid, _ in run_world(2, add_ranks, 0)]
    with pytest.raises(TimeoutError, match="ranks 0 were still running after 1 s"):
        run_world(2, sleep_on_one, deadline=1.0)
    assert all(_gone(pid) for pid in pids)
