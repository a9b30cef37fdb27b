"""The helper that every multi-rank test rests on."""

import os
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.worlds import run_world


def add_ranks(x):
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return os.getpid(), total.item() + x


def start_another():
    return subprocess.Popen(["sleep", "60"]).pid


def fail_on_one():
    if dist.get_rank() == 1:
        raise ValueError("the cause")
    dist.barrier()


def sleep_on_one():
    time.sleep(30 if dist.get_rank() == 0 else 0)


def _gone(pid):
    """Whether no process `pid` runs any more; one that has ended may wait a moment to be buried."""
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def test_results_failures_deadlines_and_orphans():
    """A hang here would hide every other failure, and a rank left behind would eat the machine."""
    first = run_world(2, add_ranks, 5)
    others = run_world(2, start_another)
    assert [total for _, total in first] == [6.0, 6.0]
    assert run_world(2, add_ranks, 0)[0][0] == first[0][0], "ranks are kept between calls"
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"failed on(.|\n)*rank 1(.|\n)*the cause"):
        run_world(2, fail_on_one)
    assert time.monotonic() - start < 20
    assert all(_gone(pid) for pid, _ in first)
    assert all(_gone(pid) for pid in others), "what a rank started must go with it"
    pids = [pid for pid, _ in run_world(2, add_ranks, 0)]
    with pytest.raises(TimeoutError, match="ranks 0 were still running after 1 s"):
        run_world(2, sleep_on_one, deadline=1.0)
    assert all(_gone(pid) for pid in pids)
