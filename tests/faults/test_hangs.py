"""A rank that hangs ends the run within the watchdog's time, named, with every living rank's stack in a file."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any, Literal

import pytest
from helpers.ranks import START_DEADLINE, Fault, Ranks, start_ranks
from helpers.tiny_run import tiny_config

pytestmark = pytest.mark.faults

LIMIT = 5.0
"""training.watchdog, seconds: a step of these runs takes a tenth of one"""

MORE = 25.0
"""what docs/training.md allows the watchdog beyond its limit, seconds"""

TWO: dict[str, Any] = {"parallel__tensor": 2}
FOUR: dict[str, Any] = {"parallel__context": 2, "parallel__pipeline": 2, "parallel__pieces": 2}


def hang(tmp_path: Path, size: int, rank: int, how: Literal["stop", "loop"], layout: dict[str, Any]) -> Ranks:
    """A run of which one rank hangs in step 3 or so; the others have ended when this returns."""
    changes = {"training__steps": 100_000, "training__micro_batch": 1, "checkpoint__every": 0}
    argv = tiny_config(tmp_path, **changes, **layout, training__watchdog=LIMIT)
    with start_ranks(size, argv, tmp_path / "start", {rank: Fault("sign", 60, how)}) as ranks:
        ranks.wait_for_moment(START_DEADLINE)
        began = time.monotonic()
        codes = ranks.wait(LIMIT + 2 * MORE, but=rank if how == "stop" else None)
        took = time.monotonic() - began
    assert codes == [None if other == rank and how == "stop" else 4 for other in range(size)], ranks.said(rank)
    assert LIMIT - 1 < took < LIMIT + MORE
    print(f"rank {rank} of {size} ({how}): ended after {took:.1f} s")
    return ranks


def report(tmp_path: Path) -> str:
    """The one file."""
    (path,) = (tmp_path / "run").glob("stuck_step_*.txt")
    return path.read_text()


@pytest.mark.parametrize(("size", "layout"), [(2, TWO), (4, FOUR)])
def test_a_rank_that_is_stopped_is_named_and_ends_the_others(tmp_path: Path, size: int, layout: dict[str, Any]) -> None:
    """Else one frozen machine keeps hundreds waiting until somebody looks, and then nobody knows which it was."""
    rank = size - 1
    ranks = hang(tmp_path, size, rank, "stop", layout)
    said = [ranks.said(other) for other in range(size - 1)]
    assert [text.count("no sign of life") for text in said] == [1, *[0] * (size - 2)]
    assert f"rank {rank} gave no answer: stopped, dead, or the machine is gone" in said[0]
    assert re.search(rf"rank {rank} \(\S+ \S+ \S+ tp\d\), process \d+ on \S+: gives no answer", said[0])
    assert "Traceback" not in "".join(said)
    text = report(tmp_path)
    assert "train_step (step.py" in said[0] or "waits for " in said[0]
    assert text.count("main thread:") == size - 1 and text.count("train_step") >= size - 1


def test_rank_0_that_is_stopped_is_named_though_it_keeps_the_store(tmp_path: Path) -> None:
    """The one rank through which the others could tell each other: each says so by itself."""
    ranks = hang(tmp_path, 4, 0, "stop", FOUR)
    for rank in (1, 2, 3):
        assert f"rank {rank} can't ask the others: rank 0, which keeps the store" in ranks.said(rank)
        assert "it is most likely rank 0 that hangs" in ranks.said(rank)
    assert report(tmp_path).count("main thread:") == 3


def test_a_rank_that_loops_is_named_with_the_line_it_is_at(tmp_path: Path) -> None:
    """A fault of a program, which would burn a night on all machines: where it is must be in the file."""
    ranks = hang(tmp_path, 2, 1, "loop", TWO)
    assert "rank 1 hangs outside of any collective" in ranks.said(0)
    assert re.search(r"rank 0 .*: waits for \w+ among ranks 0, 1 \(TENSOR_MODEL_PARALLEL_GROUP\)", ranks.said(0))
    text = report(tmp_path)
    assert "in loop_for_ever" in text and text.count("main thread:") == 2


def test_one_process_alone_is_watched_too(tmp_path: Path) -> None:
    """Nobody waits for it, so nothing else would ever end it."""
    ranks = hang(tmp_path, 1, 0, "loop", {})
    assert "rank 0 hangs" in ranks.said(0)
    assert "in loop_for_ever" in report(tmp_path)
