"""A run that goes back to its last checkpoint is the run from that checkpoint, over the rows that come next."""

import os
import signal

import pytest
from helpers.same_run import assert_same_run
from helpers.tiny_run import learned, records, tiny_config, train_here
from helpers.worlds import run_world
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from miras_megatron.parallel.lost import RankLost
from miras_megatron.training import loop
from miras_megatron.training.checkpoint_folder import complete_checkpoints
from miras_megatron.training.feed import Feed
from miras_megatron.training.main import main
from miras_megatron.training.tensor_files import _ReadPlanner
from miras_megatron.training.trouble import Judge, Trouble

BASE = {"checkpoint__every": 5, "training__steps": 10, "evaluate__every": 0, "data__split": "100,0,0"}


def complain_at(*at):
    """A `Judge.judge` that finds the steps of numbers `at`, counted in calls, bad."""
    judge, calls = Judge.judge, []

    def judged(self, loss, norm, memory):
        calls.append(loss)
        if len(calls) in at:
            return Trouble("spike", "made up", "roll_back")
        return judge(self, loss, norm, memory)

    return judged


def seek_past(steps):
    """A `Feed.seek` that leaves out the rows of `steps` more steps."""
    seek = Feed.seek

    def further(self, position):
        seek(self, position)
        for step in range(steps):
            self.step(step)

    return further


@pytest.mark.parametrize("changes", [{}, {"training__precision": "bf16", "checkpoint__background": "true"}])
def test_it_is_the_run_that_left_those_rows_out(tmp_path, monkeypatch, changes):
    """Weights, moments, random states and the schedule are the checkpoint's; rows are read once."""
    with monkeypatch.context() as patch:
        patch.setattr(Judge, "judge", complain_at(7))
        assert main(tiny_config(tmp_path, "back", **BASE, **changes)) == 0
    plain = {**BASE, **changes, "run__dir": tmp_path / "plain", "optimizer__decay_steps": 10}
    assert main(tiny_config(tmp_path, "back", **(plain | {"training__steps": 5}))) == 0
    with monkeypatch.context() as patch:
        patch.setattr(Feed, "seek", seek_past(2))
        assert main(tiny_config(tmp_path, "back", **plain)) == 0
    assert [step for step, _, _ in learned(tmp_path / "back")] == list(range(1, 11))
    assert_same_run(tmp_path / "back", tmp_path / "plain")
    (event,) = records(tmp_path / "back", "events.jsonl")
    assert (event["step"], event["back_to"], event["action"], event["reason"]) == (7, 5, "roll_back", "made up")
    assert not (tmp_path / "plain" / "events.jsonl").exists()


def roll_back_here(argv):
    judge = Judge.judge
    Judge.judge = complain_at(7)
    try:
        return train_here(argv)
    finally:
        Judge.judge = judge


@pytest.mark.parametrize("layout", [{}, {"parallel__pipeline": 2}])
def test_all_ranks_go_back_together(tmp_path, monkeypatch, layout):
    """One that stayed would wait for the others in another step."""
    assert run_world(2, roll_back_here, tiny_config(tmp_path, "two", **BASE, **layout)) == [0, 0]
    with monkeypatch.context() as patch:
        patch.setattr(Judge, "judge", complain_at(7))
        assert main(tiny_config(tmp_path, "one", **BASE)) == 0
    for (step, loss, norm), (_, one_loss, one_norm) in zip(
        learned(tmp_path / "two"), learned(tmp_path / "one"), strict=True
    ):
        assert loss == pytest.approx(one_loss, rel=1e-5), step
        assert norm == pytest.approx(one_norm, rel=1e-4), step


def test_states_that_lanes_carry_start_afresh(tmp_path, monkeypatch, caplog):
    """The checkpoint's belong to rows that aren't the next ones."""
    monkeypatch.setattr(Judge, "judge", complain_at(7))
    assert main(tiny_config(tmp_path, **BASE, data__packing="ordered")) == 0
    assert len(learned(tmp_path / "run")) == 10
    assert "go on inside a document without their state" in caplog.text


def test_it_never_goes_forward(tmp_path, monkeypatch, capsys):
    """Who has gone back to step 5 by hand, since step 10 had diverged, must not be put onto step 10 again."""
    assert main(tiny_config(tmp_path, **BASE)) == 0
    again = f"--checkpoint.resume={tmp_path / 'run' / 'checkpoints' / 'step_00000005'}"
    capsys.readouterr()
    monkeypatch.setattr(Judge, "judge", complain_at(2))
    assert main([*tiny_config(tmp_path, **BASE), again]) == 0
    assert "rolled back to step 5 (made up)" in capsys.readouterr().out
    assert [step for step, _, _ in learned(tmp_path / "run")] == list(range(1, 11))


def test_a_roll_back_stays_on_the_board_and_in_the_records(tmp_path, monkeypatch, capsys):
    """What is dropped from the curves must not take with it why; validations of the way back go, too."""
    monkeypatch.setattr(Judge, "judge", complain_at(8))
    changes = BASE | {"evaluate__every": 1, "data__split": "75,25,0", "logging__every": 100}
    assert main(tiny_config(tmp_path, **changes, logging__tensorboard="true")) == 0
    board = EventAccumulator(str(tmp_path / "run" / "tb")).Reload()
    assert [event.value for event in board.Scalars("trouble/roll_back")] == [1.0]
    assert [record["step"] for record in records(tmp_path / "run", "validation.jsonl")] == list(range(1, 11))
    told = capsys.readouterr().out
    assert "step  8/10" in told and "ROLLED BACK (spike): made up" in told and "10 steps, 1 roll back" in told


def test_two_roll_backs_at_one_step_are_two(tmp_path, monkeypatch, capsys):
    """Each leaves out other rows; told as one, a run that can't get past a step looks as if it had once stumbled."""
    monkeypatch.setattr(Judge, "judge", complain_at(7, 9))  # steps 6, 7 and again, over later rows
    assert main(tiny_config(tmp_path, **BASE, logging__tensorboard="true")) == 0
    events = records(tmp_path / "run", "events.jsonl")
    assert [(event["step"], event["rows"], event["back_to"]) for event in events] == [(7, 28, 5), (7, 36, 5)]
    board = EventAccumulator(str(tmp_path / "run" / "tb")).Reload()
    assert [event.value for event in board.Scalars("trouble/roll_back")] == [1.0, 2.0]
    assert "10 steps, 2 roll back" in capsys.readouterr().out


def test_a_roll_back_that_a_cut_run_comes_to_again_is_the_same(tmp_path, monkeypatch, capsys):
    """A start reads the rows of the one before it again: counted anew, each kill would make the run look worse."""
    step, calls = loop.train_step, []

    def cut(job, number, **options):
        calls.append(number)
        if len(calls) == 8:
            raise RankLost("made up")
        return step(job, number, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Judge, "judge", complain_at(7))
        patch.setattr(loop, "train_step", cut)
        assert main(tiny_config(tmp_path, **BASE)) == 4
    monkeypatch.setattr(Judge, "judge", complain_at(2))
    assert main(tiny_config(tmp_path, **BASE)) == 0
    assert calls == [1, 2, 3, 4, 5, 6, 7, 6]
    assert [event["step"] for event in records(tmp_path / "run", "events.jsonl")] == [7, 7]
    assert "10 steps, 1 roll back" in capsys.readouterr().out


def test_a_signal_is_heard_on_the_way_back(tmp_path, monkeypatch, capsys):
    """The time limit doesn't wait until a run gets on."""
    complain = complain_at(7)

    def judged(self, loss, norm, memory):
        found = complain(self, loss, norm, memory)
        if found is not None:
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    monkeypatch.setattr(Judge, "judge", judged)
    assert main(tiny_config(tmp_path, **BASE)) == 0
    assert "stopped by SIGTERM after step 5; run again to go on" in capsys.readouterr().out
    assert [path.name for path in complete_checkpoints(tmp_path / "run")] == ["step_00000005"]


def test_a_checkpoint_that_is_read_slowly_is_no_hang(tmp_path, monkeypatch, slow_under_watch):
    """The watchdog would end a run of a large model at every roll back."""
    monkeypatch.setattr(Judge, "judge", complain_at(7))
    watched = slow_under_watch(_ReadPlanner, "resolve_tensor")
    assert main(tiny_config(tmp_path, **BASE, **watched)) == 0
    assert [event["action"] for event in records(tmp_path / "run", "events.jsonl")] == ["roll_back"]


def test_where_there_is_no_checkpoint_it_stops(tmp_path, monkeypatch, capsys):
    """Going back to random weights is no policy anybody chose."""
    monkeypatch.setattr(Judge, "judge", complain_at(2))
    assert main(tiny_config(tmp_path, **BASE)) == 3
    told = capsys.readouterr()
    assert "there is no checkpoint yet (checkpoint.every = 5)" in told.err and "Traceback" not in told.err
    assert "ROLLED BACK" not in told.out
    (event,) = records(tmp_path / "run", "events.jsonl")
    assert (event["step"], event["action"]) == (2, "stop")


def test_a_run_that_comes_to_the_same_end_again_and_again_stops(tmp_path, capsys):
    """A learning rate that kills every time isn't mended by other rows."""
    changes = {"optimizer__lr": "1e30", "optimizer__warmup_steps": 0, "checkpoint__every": 1}
    policy = {"training__on_nan": "roll_back", "training__patience": 2}
    assert main(tiny_config(tmp_path, **(BASE | changes), **policy)) == 3
    assert "training.patience" in capsys.readouterr().err
    assert [path.name for path in complete_checkpoints(tmp_path / "run")] == ["step_00000001"]
    assert [event["action"] for event in records(tmp_path / "run", "events.jsonl")] == [
        "roll_back",
        "roll_back",
        "stop",
    ]
