"""A run whose ranks are killed again and again ends as the run that nobody disturbed: every loss, every weight, to the
last bit. Else whoever trains on machines that die trains another model each time."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import START_DEADLINE, Fault, start_ranks
from helpers.tiny_run import records, tiny_config

from miras_megatron.training.checkpoint_folder import complete_checkpoints, latest_checkpoint
from miras_megatron.training.plain_files import read_index

pytestmark = pytest.mark.faults

LAYOUTS: dict[str, dict[str, Any]] = {
    "2 data": {"training__micro_batch": 1},
    "2 data, written behind": {
        "training__micro_batch": 1,
        "optimizer__distributed": "true",
        "checkpoint__background": "true",
    },
    "2 tensor": {"parallel__tensor": 2},
    "2 pipeline": {"parallel__pipeline": 2},
    "2 context": {"parallel__context": 2, "parallel__pieces": 2},
}
SEEDS = [pytest.param(seed, marks=[pytest.mark.full] * (seed >= len(LAYOUTS))) for seed in range(20)]
"""Of the first five each has another layout."""

RUN: dict[str, Any] = {
    "training__steps": 6,
    "checkpoint__every": 2,
    "checkpoint__keep": 2,
    "parallel__timeout": 60,
    "training__watchdog": 90,
}

DEADLINE = 240.0
"""seconds for one start, on a busy machine"""

TIMES = {"seconds", "tokens_per_s", "tflops", "mfu", "peak_gib", "idle"}
"""What no two runs share."""


@dataclass
class Undisturbed:
    """The run to compare with, and the moments that its ranks had."""

    folder: Path
    moments: list[dict[str, int]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Undisturbed]:
    """By layout, made when first asked for."""
    return {}


def make_undisturbed(known: dict[str, Undisturbed], layout: str, folder: Path) -> Undisturbed:
    """The undisturbed run of a layout."""
    if layout not in known:
        argv = tiny_config(folder, "undisturbed", **RUN, **LAYOUTS[layout])
        with start_ranks(2, argv, folder / "start", counted=True) as ranks:
            assert ranks.wait(DEADLINE + START_DEADLINE) == [0, 0], ranks.said(0)
        known[layout] = Undisturbed(folder / "undisturbed", [ranks.moments(rank) for rank in (0, 1)])
    return known[layout]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_whose_ranks_are_killed_ends_as_the_undisturbed_one(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, undisturbed: dict[str, Undisturbed], seed: int
) -> None:
    """At a step, or between any two changes of the checkpoints' folder, or some milliseconds into a write."""
    layout = list(LAYOUTS)[seed % len(LAYOUTS)]
    whole = make_undisturbed(undisturbed, layout, tmp_path_factory.mktemp("whole"))
    draw = random.Random(seed)
    argv, told = tiny_config(tmp_path, **RUN, **LAYOUTS[layout]), list[str]()
    wanted = draw.randint(1, 3)
    for start in range(wanted + 1):
        rank = draw.randrange(2)
        fault = draw_fault(draw, whole.moments[rank])
        faults = {rank: fault} if start < wanted else {}
        with start_ranks(2, argv, tmp_path / f"start{start}", faults) as ranks:
            codes = ranks.wait(DEADLINE)
        if codes == [0, 0]:
            break  # a later start has fewer moments than were drawn from
        assert codes[rank] == -9 and ranks.moment(), f"{codes}\n{ranks.said(0)}\n{ranks.said(1)}"
        told.append(f"rank {rank}: {ranks.moment()}")
        assert codes[1 - rank] in (0, 4), f"{told}\n{ranks.said(1 - rank)}"
        said = ranks.said(1 - rank)
        assert "Traceback" not in said, f"{told}\n{said}"
        named = f"no answer from rank {rank}" in said or (rank == 0 and "rank 0, which keeps the store" in said)
        assert named or codes[1 - rank] == 0, f"{told}\n{said}"
    assert told and codes == [0, 0]
    check_same(tmp_path / "run", whole.folder)
    print(f"| {seed} | {layout} | {'; '.join(told)} | {start + 1} starts, equal to the last bit |")


def draw_fault(draw: random.Random, moments: dict[str, int]) -> Fault:
    """A kill at one of the moments that a rank has."""
    at = draw.choice(["sign", "file"])
    later = draw.choice([0.0, draw.uniform(0.0, 0.02)])
    number = draw.randint(1, moments[at])
    return Fault("file", number, "kill", later) if at == "file" else Fault("sign", number, "kill", later)


def check_same(run: Path, whole: Path) -> None:
    """Records, validation and the last checkpoint of two runs are the same."""
    assert [without_times(r) for r in records(run)] == [without_times(r) for r in records(whole)]
    assert records(run, "validation.jsonl") == records(whole, "validation.jsonl")
    one, other = latest_checkpoint(run), latest_checkpoint(whole)
    assert one is not None and other is not None and one.name == other.name == "step_00000006"
    assert read_index(one) == read_index(other)
    assert written(one) == written(other)
    assert [path.name for path in complete_checkpoints(run)][-1] == one.name


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in TIMES}


def written(checkpoint: Path) -> dict[str, str]:
    """File -> SHA-256, but for those that name the folder or the save."""
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    return {name: entry["sha256"] for name, entry in files.items() if name not in ("config.yaml", ".metadata")}
