"""Checkpoints that are written behind the run: the same as those it waits for, and never half of one."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest
from helpers.same_run import assert_same_run
from helpers.tiny_run import tiny_config, train_here
from helpers.worlds import run_world

from miras_megatron.parallel.shares import is_own
from miras_megatron.training import loop, tensor_files
from miras_megatron.training.checkpoint_folder import complete_checkpoints
from miras_megatron.training.checkpoint_save import Saving
from miras_megatron.training.main import main
from miras_megatron.training.tensor_files import _Planner

BEHIND = {"checkpoint__every": 2, "training__steps": 6, "evaluate__every": 0, "data__split": "100,0,0"}


def write_late(steps):
    """A `Saving.write` that begins when the run has recorded `steps` more steps than its own, or after 20 s."""
    write = Saving.write

    def late(self):
        metrics, patience = self._run_dir / "metrics.jsonl", time.monotonic() + 20
        while time.monotonic() < patience:
            lines = metrics.read_text().splitlines()
            if lines and json.loads(lines[-1])["step"] >= min(self.step + steps, 6):
                break
            time.sleep(0.01)
        write(self)

    return late


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_written_late_is_what_was_there_at_the_step(tmp_path, monkeypatch, capsys, precision):
    """Weights that change while they are written would make a checkpoint of no step at all."""
    changes = BEHIND | {"training__precision": precision}
    assert main(tiny_config(tmp_path, "waits", **changes)) == 0
    monkeypatch.setattr(Saving, "write", write_late(1))
    capsys.readouterr()
    assert main(tiny_config(tmp_path, "goes_on", **changes, checkpoint__background="true")) == 0
    lines = capsys.readouterr().out.splitlines()
    (saved,) = [i for i, line in enumerate(lines) if line.startswith("saved") and "step_00000002" in line]
    assert any(line.startswith("step 3/6") for line in lines[:saved])
    assert_same_run(tmp_path / "waits", tmp_path / "goes_on")


def late_on_one(argv):
    """A rank whose disk is slower than the other's."""
    import torch.distributed as dist

    write = Saving.write
    if dist.get_rank() == 1:
        Saving.write = write_late(1)
    try:
        return train_here(argv)
    finally:
        Saving.write = write


def save_and_count(argv):
    """On a rank: which tensors of the checkpoint weren't copied, for the rank had brought them together."""
    found = []

    def asked(tensor):
        found.append(is_own(tensor))
        return found[-1]

    with mock.patch.object(tensor_files, "is_own", asked):
        assert train_here(argv) == 0
    return found


def test_shared_moments_are_not_copied_twice(tmp_path):
    """A rank that brings them together has made a copy already: two of a large model's are more than a host has."""
    changes = BEHIND | {"training__steps": 2, "optimizer__distributed": "true", "checkpoint__background": "true"}
    ranks = run_world(2, save_and_count, tiny_config(tmp_path, **changes))
    assert any(True in found for found in ranks)  # what lies across the cut
    assert all(False in found for found in ranks)  # the rest, which training changes


@pytest.mark.parametrize("layout", [{}, {"parallel__tensor": 2}, {"optimizer__distributed": "true"}])
def test_a_checkpoint_is_named_when_every_rank_has_written(tmp_path, layout):
    """One rank's part missing, and a job of a thousand ranks has no checkpoint."""
    assert run_world(2, train_here, tiny_config(tmp_path, "waits", **BEHIND, **layout)) == [0, 0]
    behind = tiny_config(tmp_path, "goes_on", **BEHIND, **layout, checkpoint__background="true")
    assert run_world(2, late_on_one, behind) == [0, 0]
    assert_same_run(tmp_path / "waits", tmp_path / "goes_on")


def test_a_disk_that_fills_behind_the_run_is_told_as_in_front_of_it(tmp_path, capsys):
    """The thread's error must reach the user, and the checkpoint before must stay."""
    argv = tiny_config(tmp_path, **BEHIND, checkpoint__background="true")
    assert main([*argv, "--training.steps=2", "--optimizer.decay_steps=6"]) == 0
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        assert main([*argv, "--optimizer.decay_steps=6"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    error = capsys.readouterr().err
    assert "the checkpoint of step 4 can't be written (File too large)" in error and "Traceback" not in error
    assert [path.name for path in complete_checkpoints(tmp_path / "run")] == ["step_00000002"]
    assert main([*argv, "--optimizer.decay_steps=6"]) == 0


def test_a_disk_that_is_slow_behind_the_run_is_no_hang(tmp_path, slow_under_watch):
    """The run waits for its writer, which moves: ended by the watchdog it loses the checkpoint, at every start."""
    changes = BEHIND | {"training__steps": 2} | slow_under_watch(_Planner, "resolve_data")
    assert main(tiny_config(tmp_path, **changes, checkpoint__background="true")) == 0
    assert [path.name for path in complete_checkpoints(tmp_path / "run")] == ["step_00000002"]


def test_a_run_that_the_guard_stops_completes_what_it_has_begun(tmp_path, monkeypatch):
    """The last good weights are what the user needs then."""
    monkeypatch.setattr(Saving, "write", write_late(0))
    changes = {"optimizer__lr": "1e30", "optimizer__warmup_steps": 0, "checkpoint__background": "true"}
    assert main(tiny_config(tmp_path, **(BEHIND | {"checkpoint__every": 1}), **changes)) == 3
    assert [path.name for path in complete_checkpoints(tmp_path / "run")] == ["step_00000001"]


def test_a_signal_waits_for_what_is_on_its_way(tmp_path, monkeypatch):
    """Two checkpoints at once would share a folder; both must be whole when the process is gone."""
    monkeypatch.setattr(Saving, "write", write_late(1))
    step = loop.train_step

    def interrupted(job, number, **options):
        if number == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(job, number, **options)

    monkeypatch.setattr(loop, "train_step", interrupted)
    assert main(tiny_config(tmp_path, **BEHIND, checkpoint__background="true")) == 0
    assert [path.name for path in complete_checkpoints(tmp_path / "run")] == ["step_00000002", "step_00000003"]


FAILS = """
import sys
from miras_megatron.parallel.lost import RankLost
from miras_megatron.training import loop
from miras_megatron.training.checkpoint_save import Saving
from miras_megatron.training.main import main

write, step = Saving.write, loop.train_step

def slow(self):
    for _ in range(100):
        write(self)

def fails(job, number, **options):
    if number == 3:
        raise RankLost("made up")
    return step(job, number, **options)

Saving.write, loop.train_step = slow, fails
sys.exit(main(sys.argv[1:]))
"""


def test_the_exit_code_is_told_while_a_checkpoint_is_on_its_way(tmp_path):
    """A process that aborts in its writer's thread tells the scheduler of a crash that never was, and leaves a core."""
    words = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        FAILS,
        *tiny_config(tmp_path, **BEHIND, checkpoint__background="true"),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert (done.returncode, "made up" in done.stderr) == (4, True), done.stderr
