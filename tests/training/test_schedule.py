"""The learning rate at every step that users look at; a wrong one trains a worse model and nobody notices."""

import math

import pytest

from miras_megatron.config.schema import Optimizer
from miras_megatron.training.schedule import learning_rate


def rates(steps, **settings):
    optimizer = Optimizer(lr=1.0, **settings)
    return [learning_rate(step, optimizer, steps) for step in range(1, steps + 1)]


def test_warm_up_climbs_linearly_to_the_full_rate():
    """A first update at the full rate is what warm-up is there to prevent."""
    assert rates(10, warmup_steps=4, schedule="constant") == [0.25, 0.5, 0.75, 1.0] + [1.0] * 6


def test_cosine_ends_at_the_minimum():
    """The last update is made at min_lr, and the middle one at half the way."""
    got = rates(21, warmup_steps=1, min_lr=0.1)
    assert got[0] == 1.0
    assert got[10] == pytest.approx(0.55)
    assert got[20] == pytest.approx(0.1)
    assert all(a > b for a, b in zip(got, got[1:], strict=False))


def test_cosine_stays_at_the_minimum_after_decay_steps():
    """A run that goes on longer than planned must not climb the cosine again."""
    got = rates(30, decay_steps=10, min_lr=0.2)
    assert got[4] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * 0.5)))
    assert got[9:] == pytest.approx([0.2] * 21)


def test_warm_up_stable_decay_falls_over_the_last_steps():
    """The plateau is what makes a run extensible: it must be level until the fall begins."""
    got = rates(20, warmup_steps=2, schedule="wsd", decay_steps=5, min_lr=0.5)
    assert got[1:15] == [1.0] * 14
    assert got[15:] == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5])


def test_warm_up_stable_decay_falls_over_a_tenth_when_nothing_is_said():
    """The documented default."""
    got = rates(20, schedule="wsd")
    assert got[17:] == pytest.approx([1.0, 0.5, 0.0])


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_any_length_of_run_has_a_rate_between_the_minimum_and_the_maximum(schedule, steps):
    """Runs shorter than their warm-up or decay exist; none may divide by zero or leave the range."""
    for warmup in (0, 1, steps, steps + 3):
        for decay in (None, 1, steps, steps + 3):
            got = rates(steps, warmup_steps=warmup, decay_steps=decay, schedule=schedule)
            assert all(0.0 <= x <= 1.0 for x in got), (warmup, decay, got)
