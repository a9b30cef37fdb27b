"""The relay's schedule as an event simulation: how long a step takes and who waits, before anything is run.

A rank takes one piece through all its layers before the next. A layer is pre (work that needs no state), scan (in head
groups, each sent on when ready) and post; backward goes through them the other way, state gradients from right to left.
Not a model of the machine: costs are given, links are never busy, sending costs the sender nothing. What taking a
packet in costs is given too, and counts as waiting.
Needs only the standard library; docs/context_parallel.md has the figures it gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


class Parts(NamedTuple):
    """Time of one layer over a rank's whole slice, in any one unit."""

    pre: float
    """projections, convolutions, gates: before the state is waited for"""
    scan: float
    """from the state received to the state sent, all heads"""
    post: float
    """after the state is sent: output projection, MLP"""

    def scaled(self, factor: float) -> Parts:
        """Every part `factor` times as long."""
        return Parts(*(factor * part for part in self))


class LayerCosts(NamedTuple):
    """Time of one layer's forward, and of its backward without the replay."""

    forward: Parts
    backward: Parts

    @classmethod
    def of_shares(cls, pre: float, scan: float, post: float, backward: float = 2.0) -> LayerCosts:
        """Every part's backward `backward` times its forward."""
        forward = Parts(pre, scan, post)
        return cls(forward, forward.scaled(backward))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Who does what in which order. Raises ValueError for what can't be."""

    ranks: int = 1
    """context-parallel ranks; piece p is on rank p mod ranks"""
    layers: int = 1
    """layers of one pipeline stage"""
    pieces: int = 1
    """pieces a rank, of equal length"""
    head_groups: int = 1
    """groups of heads that are scanned and sent one after the other"""
    group_scan: float = 1.0
    """time of all groups' scans over that of one scan of all heads; above 1 where a group underfills the machine"""
    replay: Literal["none", "all", "all_but_last"] = "none"
    """pieces that are computed again before their backward; a rank's last one may keep its graph"""
    micro_batches: int = 1
    """sequences of one step"""
    forwards_ahead: int = 0
    """w: F0 .. Fw B0 Fw+1 B1 ..; 0 is F0 B0 F1 B1. With several stages 1F1B decides, and it must be 0"""
    stages: int = 1
    """pipeline stages, each with its own `ranks`; they exchange whole slices, 1F1B"""
    state_transfer: float = 0.0
    """time from a group's state, or its gradient, sent to received: latency + bytes / bandwidth; one's own is there"""
    receive: float = 0.0
    """time to take in a layer's packets (of one head group) that are there, either way; one's own cost nothing"""
    slice_transfer: float = 0.0
    """the same for a slice's activations between stages"""

    def __post_init__(self) -> None:
        for name in ("ranks", "layers", "pieces", "head_groups", "micro_batches", "stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be 1 or more")
        if self.forwards_ahead < 0 or (self.forwards_ahead and self.stages > 1):
            raise ValueError(f"forwards_ahead = {self.forwards_ahead}: 0 or more, and 0 where stages > 1")

    def jobs(self, stage: int) -> list[Job]:
        """What a stage does, in order."""
        count = self.micro_batches
        ahead = min(count, self.forwards_ahead + self.stages - stage - 1)
        order = [Job(stage, True, number) for number in range(ahead)]
        for number in range(count):
            order += [Job(stage, True, ahead + number)] if ahead + number < count else []
            order.append(Job(stage, False, number))
        return order


class Job(NamedTuple):
    """The forward, or the backward, of a micro-batch on all ranks of a stage."""

    stage: int
    forward: bool
    micro_batch: int


FORWARD = ("pre", "scan", "post")
BACKWARD = ("backward_post", "backward_scan", "backward_pre")


class Event(NamedTuple):
    """Something a rank was busy with. Rank r of stage s is s * ranks + r; layers are counted over all stages."""

    rank: int
    what: str
    """of FORWARD, of BACKWARD, or "replay" """
    micro_batch: int
    piece: int
    layer: int
    """-1: a replay, all layers of the stage"""
    group: int
    """of heads; -1 where all work together"""
    start: float
    end: float


@dataclass(frozen=True)
class Simulated:
    """How a schedule went; times in the unit of the costs."""

    makespan: float
    busy: tuple[float, ...]
    """of each rank"""
    events: tuple[Event, ...]
    """empty unless asked for"""

    @property
    def efficiency(self) -> float:
        """Busy time over ranks x makespan, 0 to 1; a replay counts as busy."""
        return sum(self.busy) / (len(self.busy) * self.makespan)

    @property
    def idle(self) -> float:
        """Share of the time that ranks wait."""
        return 1.0 - self.efficiency


def simulate(schedule: Schedule, costs: LayerCosts, *, events: bool = False) -> Simulated:
    """Run the schedule of one step; `events` also keeps what every rank did when, for a trace."""
    floor = _Floor(schedule, costs, events)
    waiting = [iter(schedule.jobs(stage)) for stage in range(schedule.stages)]
    current = [next(jobs, None) for jobs in waiting]
    while any(current):
        for stage, job in enumerate(current):
            while job is not None and floor.may_run(job):
                floor.run(job)
                job = current[stage] = next(waiting[stage], None)
    return Simulated(max(floor.clocks), tuple(floor.busy), tuple(floor.events))


class _Floor:
    """The ranks' clocks, while jobs are run in an order in which nobody needs what isn't made yet."""

    def __init__(self, schedule: Schedule, costs: LayerCosts, trace: bool) -> None:
        self.plan, self.trace = schedule, trace
        spread = schedule.group_scan / schedule.head_groups if schedule.head_groups > 1 else 1.0
        pre, scan, post = costs.forward.scaled(1.0 / schedule.pieces)
        back_pre, back_scan, back_post = costs.backward.scaled(1.0 / schedule.pieces)
        self.parts = {True: (pre, scan * spread, post), False: (back_post, back_scan * spread, back_pre)}
        self.replay = schedule.layers * (pre + scan * spread * schedule.head_groups + post)
        self.hop, self.take = (schedule.state_transfer, schedule.receive) if schedule.ranks > 1 else (0.0, 0.0)
        self.clocks = [0.0] * (schedule.ranks * schedule.stages)
        self.busy = list(self.clocks)
        self.events: list[Event] = []
        self.done: dict[Job, list[float]] = {}

    def may_run(self, job: Job) -> bool:
        """Whether the stage that a job takes its input from has made it."""
        source = self._source(job)
        return source is None or source in self.done

    def run(self, job: Job) -> None:
        """All pieces of a micro-batch on all ranks of a stage, in the order of the chain."""
        first, source = job.stage * self.plan.ranks, self._source(job)
        for at, end in enumerate(self.done[source] if source else ()):
            self.clocks[first + at] = max(self.clocks[first + at], end + self.plan.slice_transfer)
        states = [0.0] * (self.plan.layers * self.plan.head_groups)
        pieces = range(self.plan.ranks * self.plan.pieces)
        for piece in pieces if job.forward else reversed(pieces):
            rank = first + piece % self.plan.ranks
            if not job.forward and self._replays(piece):
                self._replay(rank, job, piece)
            states = self._walk(rank, job, piece, states)
        self.done[job] = self.clocks[first : first + self.plan.ranks]

    def _first_of(self, job: Job) -> int:
        """The piece that a job's chain begins with: nobody hands it anything."""
        return 0 if job.forward else self.plan.ranks * self.plan.pieces - 1

    def _source(self, job: Job) -> Job | None:
        other = job.stage - 1 if job.forward else job.stage + 1
        return job._replace(stage=other) if 0 <= other < self.plan.stages else None

    def _replays(self, piece: int) -> bool:
        last = piece >= self.plan.ranks * (self.plan.pieces - 1)
        return self.plan.replay == "all" or (self.plan.replay == "all_but_last" and not last)

    def _replay(self, rank: int, job: Job, piece: int) -> None:
        """Needs nobody: what the piece received is on its tape. It may pass while the state gradient is awaited."""
        start = self.clocks[rank]
        self.clocks[rank] += self.replay
        self.busy[rank] += self.replay
        if self.trace:
            self.events.append(Event(rank, "replay", job.micro_batch, piece, -1, -1, start, self.clocks[rank]))

    def _walk(self, rank: int, job: Job, piece: int, states: list[float]) -> list[float]:
        """One piece through all layers: when each (layer, group) arrives -> when it arrives at the next, in order."""
        before, scan, after = self.parts[job.forward]
        start, arrivals, groups = self.clocks[rank], iter(states), range(self.plan.head_groups)
        take = 0.0 if piece == self._first_of(job) else self.take
        clock, ends = start, []
        for _ in range(self.plan.layers):
            clock += before
            for _ in groups:
                arrival = next(arrivals)
                clock = (arrival if arrival > clock else clock) + take + scan
                ends.append(clock)
            clock += after
        self.clocks[rank] = clock
        self.busy[rank] += self.plan.layers * (before + scan * len(groups) + after)
        if self.trace:
            self._tell(rank, job, piece, start, ends)
        return [end + self.hop for end in ends] if self.hop else ends

    def _tell(self, rank: int, job: Job, piece: int, clock: float, ends: list[float]) -> None:
        """Keep the events of a walk that began at `clock` and whose scans ended at `ends`."""
        before, scan, after = self.parts[job.forward]
        first, second, third = FORWARD if job.forward else BACKWARD
        groups, layers = self.plan.head_groups, range(job.stage * self.plan.layers, (job.stage + 1) * self.plan.layers)
        for at, layer in enumerate(layers if job.forward else reversed(layers)):
            here = (job.micro_batch, piece, layer)
            self.events.append(Event(rank, first, *here, -1, clock, clock + before))
            for group, end in enumerate(ends[at * groups : (at + 1) * groups]):
                self.events.append(Event(rank, second, *here, group, end - scan, end))
                clock = end
            self.events.append(Event(rank, third, *here, -1, clock, clock + after))
            clock += after
