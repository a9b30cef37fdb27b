"""Whole runs under the switches that papers' tables, users and accidents turn."""

import os

import pytest
from helpers.tiny_run import learned, records, tiny_config, train_here
from helpers.worlds import run_world

from miras_megatron.training import checkpoint_save
from miras_megatron.training.checkpoint_folder import complete_checkpoints
from miras_megatron.training.main import main

ABLATIONS = {
    "no momentum": {"memory__momentum": "false"},
    "no keep": {"memory__keep": "false"},
    "linear memory": {"memory__depth": 1, "memory__expansion": "null"},
    "deep memory": {"memory__depth": 3},
    "no convolution": {"model__conv": 0},
    "no persistent tokens": {"model__block": "mac", "model__persistent_tokens": 0},
    "persistent tokens written": {"model__block": "mag", "model__write_persistent": "true"},
    "learned memory queries": {"model__block": "mac", "model__memory_tokens": 3},
    "delta independent of input": {"memory__rule": "yaad", "memory__delta": "constant"},
    "gates per channel": {"memory__gates": "channel", "memory__gate_rank": 4},
    "one gate for all matrices": {"memory__gates_per_layer": "false"},
    "memory and window": {"model__block": "mal"},
    "no memory": {"model__block": "attention"},
    "hybrid": {"model__pattern": "ma", "model__block": "null"},
    "channel retention": {"memory__rule": "moneta"},
    "untied": {"model__tie_embeddings": "false"},
    "recompute": {"training__recompute": "true"},
    "plain packing": {"data__packing": "plain"},
}


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_ablation_trains(tmp_path, name):
    """Each row of the papers' tables is one override away, and takes a step with a finite loss and gradient."""
    changes = {"training__steps": 2, "data__split": "100,0,0", "checkpoint__every": 0}
    assert main(tiny_config(tmp_path, **changes, **ABLATIONS[name])) == 0
    steps = learned(tmp_path / "run")
    assert len(steps) == 2
    assert all(isinstance(loss, float) and isinstance(norm, float) and norm > 0 for _, loss, norm in steps)


def test_the_guard_stops_and_names_layer_and_quantity(tmp_path, capsys):
    """A run that has gone wrong must not go on for a night; weights before the bad step are on the disk."""
    changes = {"training__steps": 8, "optimizer__lr": "1e30", "optimizer__warmup_steps": 0, "checkpoint__every": 1}
    assert main(tiny_config(tmp_path, **changes)) == 3
    error = capsys.readouterr().err
    assert "not a number: step 2: loss is nan" in error
    assert "layer 1" in error
    assert "the weights are still those of step 1" in error
    assert "training.on_nan=skip" in error
    assert "Traceback" not in error
    assert [p.name for p in complete_checkpoints(tmp_path / "run")] == ["step_00000001"]


def test_the_guard_may_skip(tmp_path):
    """The other policy: the step is left out, said so, and the run goes on."""
    changes = {"training__steps": 4, "optimizer__lr": "1e30", "optimizer__warmup_steps": 0, "data__split": "100,0,0"}
    assert main(tiny_config(tmp_path, **changes, training__on_nan="skip")) == 0
    assert [r.get("skipped", False) for r in records(tmp_path / "run")] == [False, True, True, True]


def test_a_kill_in_the_middle_of_a_save_costs_only_that_save(tmp_path, monkeypatch):
    """Nodes die while saving: the checkpoint before stays whole and the run goes on from it."""
    argv = tiny_config(tmp_path, training__steps=4, checkpoint__every=2)
    whole = tmp_path / "whole"
    assert main([*argv, f"--run.dir={whole}"]) == 0
    child = os.fork()
    if child == 0:
        _die_at_step_4(argv)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == 9
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == [".step_00000004.part", "latest", "step_00000002"]
    assert main(argv) == 0
    assert sorted(p.name for p in folder.iterdir()) == ["latest", "step_00000002", "step_00000004"]
    assert learned(tmp_path / "run") == learned(whole)


def _die_at_step_4(argv):
    """Run in a child process that kills itself after the tensors of step 4 are written."""
    try:
        write = checkpoint_save.write_manifest

        def die(folder, step, files):
            if step == 4:
                os.kill(os.getpid(), 9)
            write(folder, step, files)

        checkpoint_save.write_manifest = die
        main(argv)
    finally:
        os._exit(1)


def test_two_data_parallel_ranks_resume_bit_for_bit_and_learn_what_one_does(tmp_path):
    """More ranks are the same run: the same rows, the same sums, the same random states after a cut."""
    assert main(tiny_config(tmp_path, "one", training__steps=4)) == 0
    two = tiny_config(tmp_path, "two", training__steps=4)
    assert run_world(2, train_here, two) == [0, 0]
    cut = tiny_config(tmp_path, "cut", training__steps=2, optimizer__decay_steps=4)
    assert run_world(2, train_here, cut) == [0, 0]
    assert run_world(2, train_here, tiny_config(tmp_path, "cut", training__steps=4)) == [0, 0]
    assert learned(tmp_path / "cut") == learned(tmp_path / "two")
    for (_, loss, norm), (_, one_loss, one_norm) in zip(
        learned(tmp_path / "two"), learned(tmp_path / "one"), strict=True
    ):
        assert loss == pytest.approx(one_loss, rel=1e-5)
        assert norm == pytest.approx(one_norm, rel=1e-4)


def test_carried_states_follow_their_lanes_over_ranks(tmp_path):
    """Ordered packing on two ranks, resumed on two, reads on where each lane stood."""
    ordered = {"data__packing": "ordered", "training__micro_batch": 1, "training__steps": 4}
    assert run_world(2, train_here, tiny_config(tmp_path, "two", **ordered)) == [0, 0]
    cut = ordered | {"training__steps": 2, "optimizer__decay_steps": 4}
    assert run_world(2, train_here, tiny_config(tmp_path, "cut", **cut)) == [0, 0]
    assert run_world(2, train_here, tiny_config(tmp_path, "cut", **ordered)) == [0, 0]
    assert learned(tmp_path / "cut") == learned(tmp_path / "two")


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_a_checkpoint_goes_on_under_another_layout(tmp_path, layout):
    """Clusters change under a long run: whole tensors are stored, so two ranks' checkpoint is one rank's too."""
    steps = {"model__block": "mac", "training__steps": 4}
    assert main(tiny_config(tmp_path, "one", **steps)) == 0
    cut = steps | {"training__steps": 2, "optimizer__decay_steps": 4, f"parallel__{layout}": 2}
    assert run_world(2, train_here, tiny_config(tmp_path, "cut", **cut)) == [0, 0]
    assert main(tiny_config(tmp_path, "cut", **steps)) == 0
    for (_, loss, norm), (_, one_loss, one_norm) in zip(
        learned(tmp_path / "cut"), learned(tmp_path / "one"), strict=True
    ):
        assert loss == pytest.approx(one_loss, rel=1e-4)
        assert norm == pytest.approx(one_norm, rel=1e-3)
