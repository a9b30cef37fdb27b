"""How many pieces a rank, how many head groups: tried in the simulation, pieces first.

Pieces cost saved states and, once short, efficiency of the scan; head groups cost scan time where a group underfills
the machine, so more than one is taken only from a measured group scan. Deterministic: every rank chooses alike.
Needs only the standard library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from .simulation import LayerCosts, Schedule, Simulated, simulate

MOST_PIECES = 32
"""pieces a rank beyond which nothing is tried: a choice stays within a fraction of a second"""
WORTH = 0.005
"""efficiency that more pieces must bring, or share of the step's time that head groups must save; neither is free"""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What limits the pieces of a rank. Raises ValueError for what can't be."""

    slice_tokens: int
    """tokens of a rank: sequence length / ranks"""
    grid: int = 1
    """tokens of a chunk, or of a segment (MAC), on whose borders pieces are cut"""
    floor: int = 2048
    """tokens below which a piece isn't worth its fixed costs; of the machine, to be measured"""
    most: int = MOST_PIECES
    """pieces that are tried at most"""

    def __post_init__(self) -> None:
        for name in ("slice_tokens", "grid", "most"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be 1 or more")

    def allowed(self) -> Iterator[int]:
        """Numbers of pieces, rising: equal pieces on the grid, not too short. 1 is always one."""
        for pieces in range(1, self.most + 1):
            tokens, rest = divmod(self.slice_tokens, pieces)
            if pieces == 1 or (not rest and tokens % self.grid == 0 and tokens >= self.floor):
                yield pieces


@dataclass(frozen=True)
class Choice:
    """What was chosen, the efficiency simulated for it, and one line that says why."""

    pieces: int
    head_groups: int
    efficiency: float
    reason: str


def choose_pieces(costs: LayerCosts, schedule: Schedule, bounds: Bounds) -> Choice:
    """The fewest pieces a rank whose simulated efficiency is within WORTH of the best allowed.

    costs     of one layer over a rank's whole slice; shares will do (LayerCosts.of_shares)
    schedule  ranks, layers, replay, micro-batches; its pieces are not looked at
    """
    tried = {v: simulate(replace(schedule, pieces=v), costs).efficiency for v in _worth_trying(schedule, bounds)}
    best = max(tried.values())
    pieces = min(v for v, efficiency in tried.items() if efficiency >= best - WORTH)
    reason = f"{_count(pieces, 'piece')} a rank: {_gain(tried[1], tried[pieces])} simulated on {schedule.ranks} ranks"
    return Choice(pieces, schedule.head_groups, tried[pieces], f"{reason}; {_limit(pieces, tried, schedule, bounds)}")


def choose_head_groups(costs: LayerCosts, schedule: Schedule, measured: Mapping[int, float]) -> Choice:
    """More than one head group only where the step gets shorter by WORTH of its time; schedule.pieces is kept.

    measured  head groups -> time of their scans, all together, over that of one scan of all heads; empty: none measured
    """
    alone = simulate(replace(schedule, head_groups=1, group_scan=1.0), costs)
    chosen, groups = alone, 1
    for count in sorted(count for count in measured if count > 1):
        tried = simulate(replace(schedule, head_groups=count, group_scan=measured[count]), costs)
        if tried.makespan < chosen.makespan - WORTH * alone.makespan:
            chosen, groups = tried, count
    return Choice(schedule.pieces, groups, chosen.efficiency, _why_groups(groups, alone, chosen, measured))


def choose(
    costs: LayerCosts, schedule: Schedule, bounds: Bounds, measured: Mapping[int, float] | None = None
) -> Choice:
    """Pieces with one head group, then head groups with those pieces."""
    first = choose_pieces(costs, replace(schedule, head_groups=1, group_scan=1.0), bounds)
    then = choose_head_groups(costs, replace(schedule, pieces=first.pieces), measured or {})
    return Choice(first.pieces, then.head_groups, then.efficiency, f"{first.reason}; {then.reason}")


def most_ranks(costs: LayerCosts, layers: int, head_groups: int = 1, group_scan: float = 1.0) -> float:
    """Ranks up to which the chain is back before a rank runs dry, so that pieces help: L tau M / scan.

    tau is a layer's forward, scan its scan of all heads. Raises ValueError where there is no scan: nobody waits then.
    """
    pre, scan, post = costs.forward
    if scan <= 0.0:
        raise ValueError("costs.forward.scan = 0: without a scan nobody waits, and any number of ranks will do")
    return layers * (pre + scan * group_scan + post) * head_groups / (scan * group_scan)


def _worth_trying(schedule: Schedule, bounds: Bounds) -> Iterator[int]:
    """All allowed; one rank waits for nobody."""
    return iter([1]) if schedule.ranks == 1 else bounds.allowed()


def _limit(pieces: int, tried: dict[int, float], schedule: Schedule, bounds: Bounds) -> str:
    """What kept the choice from more pieces."""
    if schedule.ranks == 1:
        return "one rank waits for nobody"
    if pieces < max(tried):
        return f"{max(tried)} would bring less than {100 * WORTH:g} points more"
    return f"more are not allowed ({bounds.slice_tokens} tokens a rank, grid {bounds.grid}, floor {bounds.floor})"


def _why_groups(groups: int, alone: Simulated, chosen: Simulated, measured: Mapping[int, float]) -> str:
    if not any(count > 1 for count in measured):
        return "1 head group: no group scan was measured"
    if groups == 1:
        return "1 head group: the measured group scans cost more than the waiting they save"
    saved = 1.0 - chosen.makespan / alone.makespan
    return f"{groups} head groups: the step is {100 * saved:.1f}% shorter, scans at x{measured[groups]:g} counted"


def _gain(before: float, after: float) -> str:
    return f"efficiency {after:.3f}" + (f" (one piece: {before:.3f})" if after != before else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"
