"""A run that was cut and resumed is the run that was never cut, to the last bit."""

import os
import resource

import pytest
from helpers.same_run import assert_same_run
from helpers.tiny_run import learned, records, tiny_config

from miras_megatron.training.checkpoint_folder import complete_checkpoints
from miras_megatron.training.main import main


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"training__precision": "fp32"}, marks=pytest.mark.full),
        {"training__precision": "bf16"},
        {"training__precision": "fp32", "data__packing": "ordered", "model__block": "mac"},
    ],
    ids=["fp32", "bf16", "ordered"],
)
def test_five_and_five_steps_are_ten(tmp_path, changes):
    """Weights, moments, masters, data position, carried states and random states all go on where they stood."""
    assert main(tiny_config(tmp_path, "whole", **changes)) == 0
    cut = {"run__dir": tmp_path / "cut"}
    assert main(tiny_config(tmp_path, "whole", **changes, **cut, optimizer__decay_steps=10, training__steps=5)) == 0
    assert len(learned(tmp_path / "cut")) == 5
    assert main(tiny_config(tmp_path, "whole", **changes, **cut)) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    assert records(tmp_path / "whole")[-1]["loss"] < records(tmp_path / "whole")[0]["loss"]


def test_a_full_disk_gives_one_message_and_leaves_the_checkpoint_before(tmp_path, capsys):
    """A night's end on a full disk: what to do, not a traceback; after room was made the run goes on."""
    argv = tiny_config(tmp_path, checkpoint__every=2, training__steps=4, evaluate__every=0, data__split="100,0,0")
    assert main([*argv, "--training.steps=2", "--optimizer.decay_steps=4"]) == 0
    kept = tmp_path / "run" / "checkpoints" / "step_00000002"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        assert main([*argv, "--optimizer.decay_steps=4"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    error = capsys.readouterr().err
    assert "the checkpoint of step 4 can't be written (File too large)" in error
    assert f"{kept} stays" in error and "Traceback" not in error
    assert [p.name for p in complete_checkpoints(tmp_path / "run")] == ["step_00000002"]
    assert main([*argv, "--optimizer.decay_steps=4"]) == 0
    assert [p.name for p in complete_checkpoints(tmp_path / "run")] == ["step_00000002", "step_00000004"]


def test_a_latest_without_room_is_told_of_the_checkpoint_that_the_run_goes_on_from(tmp_path, capsys):
    """The message named step 2, and step 4 lay beside it as if complete: which of them counts?"""
    argv = tiny_config(tmp_path, checkpoint__every=2, training__steps=4, evaluate__every=0, data__split="100,0,0")
    assert main([*argv, "--training.steps=2", "--optimizer.decay_steps=4"]) == 0
    folder = tmp_path / "run" / "checkpoints"
    in_the_way = folder / f"latest.{os.getpid()}.tmp"
    in_the_way.mkdir()
    assert main([*argv, "--optimizer.decay_steps=4"]) == 2
    error = capsys.readouterr().err
    assert "the checkpoint of step 4 can't be written" in error
    assert f"{folder / 'step_00000002'} stays, run again to go on from it" in error
    assert [path.name for path in complete_checkpoints(tmp_path / "run")] == ["step_00000002"]
    in_the_way.rmdir()
    assert main([*argv, "--optimizer.decay_steps=4"]) == 0
    assert [path.name for path in complete_checkpoints(tmp_path / "run")] == ["step_00000002", "step_00000004"]


def test_a_later_checkpoint_that_latest_does_not_name_is_told(tmp_path, capsys):
    """A kill between its name and `latest` costs some steps, which come out the same. But why did they come again?"""
    argv = tiny_config(tmp_path, checkpoint__every=2, training__steps=4, evaluate__every=0, data__split="100,0,0")
    assert main(argv) == 0
    assert "is later" not in capsys.readouterr().out
    before, folder = learned(tmp_path / "run"), tmp_path / "run" / "checkpoints"
    (folder / "latest").write_text("step_00000002\n")
    assert main(argv) == 0
    told = capsys.readouterr().out
    assert f"goes on from {folder / 'step_00000002'} (step 2)" in told
    assert f"note: {folder / 'step_00000004'} is later" in told and f"--resume {folder / 'step_00000004'}" in told
    assert learned(tmp_path / "run") == before
