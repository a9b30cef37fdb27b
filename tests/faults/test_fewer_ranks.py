"""A run goes on with fewer data-parallel replicas: else a machine lost for good ends it, or makes another run of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import START_DEADLINE, start_ranks
from helpers.tiny_run import learned, tiny_config

from miras_megatron.training.main import main

pytestmark = pytest.mark.faults

RUN: dict[str, Any] = {"training__steps": 8, "checkpoint__every": 4, "training__micro_batch": 1}

CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "2 to 1": (2, 1, {}),
    "4 to 2, documents in order": (4, 2, {"data__packing": "ordered"}),
    "4 to 2, each two tensor ranks, shared moments": (4, 2, {"parallel__tensor": 2, "optimizer__distributed": "true"}),
}


def train_on(ranks: int, argv: list[str], folder: Path) -> None:
    """A run, or a part of one."""
    with start_ranks(ranks, argv, folder) as started:
        assert started.wait(START_DEADLINE) == [0] * ranks, started.said(0)


@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_on_with_half_the_replicas(tmp_path: Path, name: str) -> None:
    """The same rows in the same order, the same batch: losses within 1e-6 of those of the run that lost nobody."""
    before, after, changes = CASES[name]
    train_on(before, tiny_config(tmp_path, "whole", **RUN, **changes), tmp_path / "whole_run")
    argv = tiny_config(tmp_path, "cut", **RUN, **changes)
    train_on(before, [*argv, "--training.steps=4", "--optimizer.decay_steps=8"], tmp_path / "first")
    train_on(after, argv, tmp_path / "second")
    whole, cut = learned(tmp_path / "whole"), learned(tmp_path / "cut")
    assert len(cut) == 8 and cut[:4] == whole[:4]
    for (step, loss, norm), (_, other_loss, other_norm) in zip(whole, cut, strict=True):
        assert other_loss == pytest.approx(loss, rel=1e-6), f"step {step}"
        assert other_norm == pytest.approx(norm, rel=1e-4), f"step {step}"


def test_replicas_that_cannot_share_the_batch_are_refused_with_the_number_that_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that goes on may not change its batch, so 'nearest 3' alone would be no way out."""
    for name, value in {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 3,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,
    }.items():
        monkeypatch.setenv(name, str(value))
    assert main(tiny_config(tmp_path, **RUN)) == 2
    assert "data-parallel ranks = 3; nearest 3; or keep it and start 2 ranks" in capsys.readouterr().err
