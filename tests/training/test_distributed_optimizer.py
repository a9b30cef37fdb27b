"""Moments and masters shared by ranks: the same run, the same checkpoints, a part of the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from helpers.tiny_run import learned, records, tiny_config, train_here
from helpers.worlds import run_world

from miras_megatron.training import build_job
from miras_megatron.training.main import main
from miras_megatron.training.plain_files import read_index

SHARED = {"optimizer__distributed": "true"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "data": (2, {}),
    "context": (2, {"parallel__context": 2}),
    "bf16": (2, {"training__precision": "bf16", "optimizer__clip": 0.0}),
    "data and tensor": (4, {"parallel__tensor": 2}),
    "data and pipeline": (4, {"parallel__pipeline": 2}),
}
GIVEN = [pytest.param(name, marks=[pytest.mark.full] * (ranks > 2)) for name, (ranks, _) in LAYOUTS.items()]


def train_and_count(argv: list[str]) -> int:
    """One rank's part of a run, as torchrun would start it; the numbers its AdamW keeps."""
    made: list[Any] = []
    make = build_job.make_engine

    def keep(*args: Any) -> Any:
        made.append(make(*args))
        return made[-1]

    with mock.patch.object(build_job, "make_engine", keep):
        assert train_here(argv) == 0
    return sum(state["exp_avg"].numel() for state in made[0].optimizer.optimizer.state.values())


def train_on(ranks: int, folder: Path, name: str, **changes: Any) -> list[int]:
    """Train on so many ranks; the numbers that AdamW keeps on each."""
    argv = tiny_config(folder, name, **changes)
    if ranks == 1:
        assert main(argv) == 0
        return []
    return run_world(ranks, train_and_count, argv)


def check_alike(run: Path, other: Path, rel: float) -> None:
    """Losses and gradient norms, step by step."""
    here, there = learned(run), learned(other)
    assert len(here) == len(there) > 0
    for one, two in zip(here, there, strict=True):
        assert one == pytest.approx(two, rel=rel)


@pytest.mark.parametrize("name", GIVEN)
def test_shared_moments_learn_what_whole_ones_do(tmp_path: Path, name: str) -> None:
    """Half the memory on two ranks, and nothing else: losses, norms, each parameter's, and what lies on the disk.

    Squares of gradients are added in another order, so clipping differs in the last bit; bf16 weights, which come from
    the same float32 masters, may round the other way after it, so they are compared without clipping.
    """
    ranks, layout = LAYOUTS[name]
    changes = layout | {"training__steps": 4, "training__micro_batch": 1, "logging__gradients_every": 2}
    whole = train_on(ranks, tmp_path, "whole", **changes)
    shared = train_on(ranks, tmp_path, "shared", **changes, **SHARED)
    assert sum(shared) == sum(whole) / 2 and max(shared) < 0.6 * max(whole)
    check_alike(tmp_path / "shared", tmp_path / "whole", rel=1e-6)
    norms = [records(tmp_path / run, "gradients.jsonl") for run in ("shared", "whole")]
    for here, there in zip(*norms, strict=True):
        assert here["gradients"] == pytest.approx(there["gradients"], rel=1e-5)
    stored = [read_index(tmp_path / run / "checkpoints" / "step_00000004") for run in ("shared", "whole")]
    one, other = ({key: (tuple(x.size), x.properties.dtype) for key, x in index.items()} for index in stored)
    assert one == other


def test_shared_moments_go_on_bit_for_bit_and_with_others(tmp_path: Path) -> None:
    """A checkpoint says nothing of sharing: two ranks go on from it sharing, not sharing, or as one rank."""
    steps = {"training__steps": 4, "training__micro_batch": 1, "training__precision": "bf16"}
    half = steps | {"training__steps": 2, "optimizer__decay_steps": 4}
    train_on(2, tmp_path, "uncut", **steps, **SHARED)
    for name, before, ranks, after in (
        ("same", SHARED, 2, SHARED),
        ("no_more", SHARED, 2, {}),
        ("from_now_on", {}, 2, SHARED),
        ("one_rank", SHARED, 1, {}),
    ):
        train_on(2, tmp_path, name, **half, **before)
        train_on(ranks, tmp_path, name, **steps, **after)
        check_alike(tmp_path / name, tmp_path / "uncut", rel=1e-5)
    assert learned(tmp_path / "same") == learned(tmp_path / "uncut")
