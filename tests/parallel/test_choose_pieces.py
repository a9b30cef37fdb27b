"""How many pieces and head groups: as few as do, and never more than the tokens and the grid allow."""

from __future__ import annotations

import time

import pytest

from miras_megatron.parallel.choose_pieces import WORTH, Bounds, choose, choose_head_groups, choose_pieces, most_ranks
from miras_megatron.parallel.simulation import LayerCosts, Schedule, simulate

PLAIN = LayerCosts.of_shares(0.2, 0.3, 0.5)
MAC = LayerCosts.of_shares(0.1, 0.55, 0.35)
EIGHT = Schedule(ranks=8, layers=24, replay="all")
ROOMY = Bounds(slice_tokens=32768, grid=64, floor=512)


def test_one_rank_takes_one_piece():
    """Pieces cost memory, and one rank waits for nobody."""
    found = choose(PLAIN, Schedule(layers=24), ROOMY, {2: 1.0})
    assert (found.pieces, found.head_groups, found.efficiency) == (1, 1, pytest.approx(1.0))


@pytest.mark.parametrize("costs", [PLAIN, MAC])
def test_the_fewest_pieces_that_come_near_the_best(costs):
    """Every piece more costs saved states; half a point of efficiency is worth one."""
    found = choose_pieces(costs, EIGHT, ROOMY)
    tried = {
        v: simulate(Schedule(ranks=8, layers=24, replay="all", pieces=v), costs).efficiency
        for v in (1, 2, 4, 8, 16, 32)
    }
    assert found.efficiency == pytest.approx(tried[found.pieces])
    assert found.efficiency >= max(tried.values()) - WORTH > max(e for v, e in tried.items() if v < found.pieces)


def test_a_bound_that_is_reached_is_named():
    """A user can move it only when told which it was."""
    for bounds, pieces in (
        (Bounds(slice_tokens=32768, grid=64, floor=16384), 2),
        (Bounds(slice_tokens=32768, grid=8192, floor=1), 4),
        (Bounds(slice_tokens=32768, grid=64, floor=1, most=3), 2),
        (Bounds(slice_tokens=1000, grid=64, floor=1), 1),
    ):
        found = choose_pieces(PLAIN, EIGHT, bounds)
        assert found.pieces == pieces
        assert "more are not allowed" in found.reason and f"grid {bounds.grid}" in found.reason


def test_pieces_are_equal_and_on_the_grid():
    """The state is smallest where a chunk ends, and unequal pieces wait for the longest."""
    assert list(Bounds(slice_tokens=960, grid=64, floor=64).allowed()) == [1, 3, 5, 15]
    assert list(Bounds(slice_tokens=63, grid=64, floor=1).allowed()) == [1]


def test_head_groups_are_taken_only_when_measured_to_pay():
    """On a CPU total scan work grows by 1.28 at two groups, 1.79 at four: there they hurt."""
    few = Schedule(ranks=8, layers=24, replay="all", pieces=8)
    assert choose_head_groups(PLAIN, few, {}).head_groups == 1
    hurt = choose_head_groups(PLAIN, few, {2: 1.28, 4: 1.79})
    assert hurt.head_groups == 1 and "cost more" in hurt.reason
    paid = choose_head_groups(PLAIN, Schedule(ranks=64, layers=24, replay="all"), {2: 1.0, 4: 1.02})
    assert paid.head_groups == 4 and "% shorter" in paid.reason


def test_busy_with_slower_scans_is_no_gain():
    """Inflated scans keep ranks busy, so efficiency rises while the step gets longer: time decides."""
    schedule = Schedule(ranks=8, layers=24, pieces=4)
    found = choose_head_groups(PLAIN, schedule, {2: 3.0})
    assert found.head_groups == 1


def test_the_choice_is_quick_and_the_same_every_time():
    """All ranks choose for themselves at the start; the reason is one line of the log."""
    schedule = Schedule(ranks=64, layers=24, replay="all")
    began = time.process_time()
    found = choose(MAC, schedule, ROOMY, {2: 1.02})
    assert time.process_time() - began < 1.0
    assert choose(MAC, schedule, ROOMY, {2: 1.02}) == found
    assert "\n" not in found.reason and f"{found.pieces} pieces a rank" in found.reason


def test_the_rule_of_thumb():
    """Ranks beyond it run dry, however many pieces."""
    assert most_ranks(PLAIN, 24) == pytest.approx(80)
    assert most_ranks(MAC, 24) == pytest.approx(43.6, abs=0.05)
    assert most_ranks(PLAIN, 24, head_groups=4) == pytest.approx(320)
    with pytest.raises(ValueError, match="scan = 0"):
        most_ranks(LayerCosts.of_shares(1.0, 0.0, 0.0), 24)


@pytest.mark.parametrize("costs", [PLAIN, MAC])
def test_the_rule_of_thumb_is_the_simulations(costs):
    """Within it, more pieces shrink the wait in proportion; beyond it hardly."""
    bound = most_ranks(costs, 24)

    def waits(ranks, pieces):
        found = simulate(Schedule(ranks=ranks, layers=24, pieces=pieces), costs)
        return found.makespan / found.busy[0] - 1

    within, beyond = int(bound) - 1, int(3 * bound)
    assert waits(within, 4) == pytest.approx(waits(within, 1) / 4, rel=0.02)
    assert waits(beyond, 4) > 0.6 * waits(beyond, 1)


@pytest.mark.parametrize("wrong", ["slice_tokens", "grid", "most"])
def test_bounds_that_cannot_be_are_refused_by_name(wrong):
    """Division by nothing helps nobody."""
    with pytest.raises(ValueError, match=wrong):
        Bounds(**{"slice_tokens": 64} | {wrong: 0})
