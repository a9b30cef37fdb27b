"""A judge that is too strict loses good steps, one that is too mild loses the run; all ranks must judge alike."""

from dataclasses import replace

import pytest

from miras_megatron.config.schema import Training
from miras_megatron.training.trouble import ENOUGH, LONG, WINDOW, Judge

WATCHFUL = Training(on_spike="skip", on_divergence="roll_back", patience=3)


def seasoned(settings=WATCHFUL, steps=ENOUGH):
    """A judge that has seen `steps` good steps of loss 3 and gradient norm 0.5."""
    judge = Judge(settings)
    assert all(judge.judge(3.0, 0.5, {}) is None for _ in range(steps))
    return judge


@pytest.mark.parametrize(("loss", "norm"), [(float("nan"), 1.0), (2.0, float("inf"))])
@pytest.mark.parametrize("action", ["stop", "skip", "roll_back"])
def test_what_is_no_number_is_never_applied(loss, norm, action):
    """Also in the first step, and whatever the other policies are."""
    trouble = Judge(replace(WATCHFUL, on_nan=action)).judge(loss, norm, {})
    assert (trouble.kind, trouble.action) == ("nan", action)
    assert f"loss is {loss}" in trouble.reason


@pytest.mark.parametrize(
    ("loss", "norm", "told"),
    [
        (3.99, 4.99, None),
        (4.01, 0.5, "loss 4.0100 is 1.01 nats above the median of the last 16"),
        (3.0, 5.01, "gradient norm 5.01 is 10 times the median of the last 16"),
    ],
)
def test_a_spike_is_measured_by_the_last_steps(loss, norm, told):
    """The bounds are those of the configuration, to the digit."""
    trouble = seasoned().judge(loss, norm, {})
    assert (trouble and trouble.reason) == told
    if trouble:
        assert (trouble.kind, trouble.action) == ("spike", "skip")
        assert str(trouble) == f"SKIPPED (spike): {told}"


def test_the_first_steps_are_no_spikes():
    """Losses fall fast then, and gradients are large."""
    assert seasoned(steps=ENOUGH - 1).judge(30.0, 500.0, {}) is None
    assert Judge(Training()).judge(3.0, 0.5, {}) is None
    assert seasoned(Training(), WINDOW).judge(30.0, 500.0, {}) is None  # ignored unless asked for


def test_a_bad_step_is_no_measure_for_the_next():
    """Else a run that diverges slowly drags its own bound along."""
    judge = seasoned()
    before = judge.recent()
    assert judge.judge(9.0, 0.5, {}) is not None
    after = judge.recent()
    assert (after["losses"], after["norms"]) == (before["losses"], before["norms"])
    assert judge.judge(3.0, 0.5, {}) is None


@pytest.mark.parametrize("norm", [1001.0, float("nan"), float("inf")])
def test_a_memory_that_runs_away_is_named(norm):
    """Its loss may look healthy for a thousand steps more."""
    memory = {"layer_1": {"state_norm": 3.0}, "layer_4": {"surprise": 1.0, "state_norm": norm}}
    trouble = seasoned().judge(3.0, 0.5, memory)
    assert (trouble.kind, trouble.action) == ("divergence", "roll_back")
    assert "layer_4" in trouble.reason and "training.state_norm_limit = 1000" in trouble.reason


def test_patience_ends():
    """A run that skips for ever burns a cluster for nothing."""
    judge = seasoned()
    actions = [judge.judge(9.0, 0.5, {}).action for _ in range(4)]
    assert actions == ["skip", "skip", "skip", "stop"]
    endless = seasoned(replace(WATCHFUL, patience=0))
    assert {endless.judge(9.0, 0.5, {}).action for _ in range(50)} == {"skip"}


def test_checkpoints_give_no_new_patience_while_most_steps_are_bad():
    """Saved every other step, a run whose every update is left out would go on to its end and say done."""
    judge = seasoned()
    for _ in range(3):
        assert judge.judge(9.0, 0.5, {}).action == "skip"
        judge.saved()
    assert judge.judge(9.0, 0.5, {}).action == "stop"
    for _ in range(LONG):
        assert judge.judge(3.0, 0.5, {}) is None
    judge.saved()
    assert judge.judge(9.0, 0.5, {}).action == "skip"


def test_bad_steps_far_apart_count_from_one_checkpoint_to_the_next():
    """A run that rolls back again and again over the same long way never gets on."""
    judge = seasoned()
    actions = []
    for _ in range(4):
        actions.append(judge.judge(9.0, 0.5, {}).action)
        assert all(judge.judge(3.0, 0.5, {}) is None for _ in range(LONG))
    assert actions == ["skip", "skip", "skip", "stop"]


def test_of_two_policies_the_stronger_wins():
    """A run that is to stop at a spike must not skip it because a memory is large, too."""
    memory = {"layer_1": {"state_norm": 1e9}}
    judge = seasoned(replace(WATCHFUL, on_spike="stop", on_divergence="skip"))
    assert judge.judge(9.0, 0.5, memory).action == "stop"
    assert judge.judge(3.0, 0.5, memory).action == "skip"


def test_what_it_remembers_goes_into_a_checkpoint():
    """A resumed run that had forgotten would accept the spike that the whole run skips."""
    judge = Judge(WATCHFUL)
    judge.remember(seasoned(steps=WINDOW + 9).recent())
    assert judge.judge(4.5, 0.5, {}) is not None
    assert [judge.judge(4.5, 0.5, {}).action for _ in range(2)] == ["skip", "skip"]
    other = Judge(WATCHFUL)
    other.remember(judge.recent())  # bad steps count on after a cut
    assert other.judge(4.5, 0.5, {}).action == "stop"
    judge.remember({})
    assert judge.judge(4.5, 0.5, {}) is None
