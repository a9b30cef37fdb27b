"""What users plot: one object a step, whatever the run went through."""

import io
import json

import pytest
from helpers.step_reports import report
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from miras_megatron.training.run_log import RunLog
from miras_megatron.training.trouble import Trouble

FIELDS = {"step", "loss", "grad_norm", "lr", "tokens", "seconds", "tokens_per_s", "tflops", "mfu", "peak_gib"}


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_step_is_one_object_with_the_promised_fields(tmp_path):
    """Users' scripts read these names."""
    log = RunLog(tmp_path, last_step=0, steps=3, tensorboard=False, console=io.StringIO())
    for step in (1, 2, 3):
        log.step(report(step))
    log.close()
    assert [set(line) for line in read(tmp_path / "metrics.jsonl")] == [FIELDS] * 3


def test_the_inner_loop_is_visible_a_layer_and_quantity(tmp_path):
    """Without it nobody sees a memory diverge before the loss does."""
    log = RunLog(tmp_path, last_step=0, steps=1, console=io.StringIO())
    log.step(report(1, memory={"layer_0": {"surprise": 0.7, "state_norm": 3.0}}))
    log.close()
    assert read(tmp_path / "metrics.jsonl")[0]["memory"] == {"layer_0": {"surprise": 0.7, "state_norm": 3.0}}
    board = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert board.Scalars("memory/layer_0/surprise")[0].value == pytest.approx(0.7)
    assert board.Scalars("loss/train")[0].value == pytest.approx(2.5)


def test_resuming_drops_what_came_after_the_checkpoint(tmp_path):
    """Otherwise a curve has two values at the repeated steps. The last line was cut by the kill."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s}) + "\n" for s in range(1, 8)) + '{"step": 8, "lo')
    log = RunLog(tmp_path, last_step=5, steps=10, tensorboard=False, console=io.StringIO())
    log.step(report(6))
    log.close()
    assert [line["step"] for line in read(path)] == [1, 2, 3, 4, 5, 6]


def test_a_number_that_is_none_is_still_json(tmp_path):
    """Strict readers refuse a bare NaN, and the step that went wrong is the one people look for."""
    log = RunLog(tmp_path, last_step=0, steps=1, tensorboard=False, console=io.StringIO())
    log.step(report(1, loss=float("nan"), grad_norm=float("inf"), trouble=Trouble("nan", "loss is nan", "skip")))
    log.close()
    line = read(tmp_path / "metrics.jsonl")[0]
    assert (line["loss"], line["grad_norm"], line["skipped"]) == ("nan", "inf", True)


def test_only_rank_0_writes(tmp_path):
    """Two writers to one file break it."""
    out = io.StringIO()
    log = RunLog(tmp_path / "run", last_step=0, steps=1, writes=False, console=out)
    log.step(report(1))
    log.say("hello")
    log.close()
    assert not (tmp_path / "run").exists()
    assert out.getvalue() == ""


def test_the_console_has_one_line_a_step_and_honours_every(tmp_path):
    """A log of a million lines hides what matters; the first and the last step are always there."""
    out = io.StringIO()
    log = RunLog(tmp_path, last_step=0, steps=7, every=3, tensorboard=False, console=out)
    for step in range(1, 8):
        log.step(report(step))
    log.close()
    assert [line.split("/")[0].split()[1] for line in out.getvalue().splitlines()] == ["1", "3", "6", "7"]
