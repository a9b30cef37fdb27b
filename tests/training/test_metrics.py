"""What people look for in a step."""

from helpers.step_reports import report

from miras_megatron.training.metrics import console_line


def test_the_console_line_has_the_six_things_people_look_for():
    """step, loss, gradient norm, learning rate, tokens/s, time left."""
    line = console_line(report(10, tokens_per_s=12345.0), steps=100, pace=41.0)
    assert line == "step  10/100 | loss 2.5000 | grad norm 0.5 | lr 0.001 | 12.3k tokens/s | ETA 1:01:30"
