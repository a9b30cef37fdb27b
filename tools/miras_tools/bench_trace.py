"""From traces of steps to the relay's idle share: as it was, and as the simulation has it with costs of one rank.

Of a one-rank step in pieces every hand-over between neighbouring pieces is noted; they are where a layer's scan begins
and ends. A whole rank's idle share counts waits inside its pieces and the time after its last one; what a step does
beside the pieces (reading, summing, updating) is in neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from miras_megatron.parallel.simulation import LayerCosts, Parts, Schedule, simulate

from .bench_ranks import Answer

Event = dict[str, Any]


class Mark(NamedTuple):
    """One hand-over: microseconds, "send" or "receive", direction, key, bytes."""

    time: float
    what: str
    direction: str
    micro_batch: int
    piece: int
    layer: int
    slot: int
    bytes: int


class Spans(NamedTuple):
    """Seconds of one piece: up to its first scan, its scans, after its last scan, all of it."""

    before: float
    scans: float
    after: float
    all: float


def idle_of_trace(ranks: Sequence[Sequence[Event]]) -> float:
    """Mean idle share of ranks, from their first piece's begin to the end of the last piece of all."""
    pieces = [[event for event in events if event["cat"] == "piece"] for events in ranks]
    start = min(event["ts"] for rank in pieces for event in rank)
    ends = [max(event["ts"] + event["dur"] for event in rank) for rank in pieces]
    waits = [sum(event["dur"] for event in events if event["cat"] == "wait") for events in ranks]
    whole = max(ends) - start
    return fmean((wait + max(ends) - end) / whole for wait, end in zip(waits, ends, strict=True))


def simulated_idle(costs: LayerCosts, ranks: int, layers: int, pieces: int, receive: float = 0.0) -> float:
    """Of the relay's schedule, each rank's last piece keeping its graph.

    costs    of one layer over a rank's slice, seconds
    receive  seconds to take in one layer's packets at a border, once they are there
    """
    schedule = Schedule(ranks=ranks, layers=layers, pieces=pieces, replay="all_but_last", receive=receive)
    return simulate(schedule, costs).idle


def packet_sizes(answer: Answer) -> list[int]:
    """Bytes of every packet that a layer hands over at one border, from a traced step of one rank."""
    marks = [Mark(*mark) for mark in answer["marks"]]
    chosen = {
        mark.slot: mark.bytes for mark in marks if (mark.what, mark.direction, mark.layer) == ("send", "right", 1)
    }
    return [chosen[slot] for slot in sorted(chosen)]


def calibrate(answer: Answer, layers: int, pieces: int, ranks: int = 2) -> LayerCosts:
    """Costs of one layer over a rank's slice, from a traced step of one rank in `pieces` pieces.

    The first piece receives nothing and the last sends nothing, so the median of the others stands for all.
    """
    marks = [Mark(*mark) for mark in answer["marks"]]
    spans = {event["name"]: event for event in answer["events"] if event["cat"] == "piece"}
    inner = range(1, pieces - 1)
    forward = _typical(_spans(spans[f"forward {p}"], _scans(marks, p, "right", layers)) for p in inner)
    backward = _typical(_spans(spans[f"backward {p}"], _scans(marks, p, "left", layers)) for p in inner)
    pre, scan, post = _parts(forward, layers)
    back_post, back_scan, back_pre = _parts(backward, layers)
    whole = LayerCosts(Parts(pre, scan, post), Parts(back_pre, back_scan, back_post))
    return LayerCosts(*(part.scaled(pieces / ranks) for part in whole))


def _scans(marks: Sequence[Mark], piece: int, direction: str, layers: int) -> list[tuple[float, float]]:
    """Begin and end of each layer's scan in a piece, in seconds, in the order they ran.

    A layer's state has the last slot at a border. Forward: received at the left border, sent at the right one;
    backward: received at the right, sent at the left.
    """
    forward = direction == "right"
    entry, leave = (piece, piece + 1) if forward else (piece + 1, piece)
    slot = max(mark.slot for mark in marks)
    state = [mark for mark in marks if mark.slot == slot and mark.direction == direction]
    came = {mark.layer: mark.time for mark in state if mark.what == "receive" and mark.piece == entry}
    gone = {mark.layer: mark.time for mark in state if mark.what == "send" and mark.piece == leave}
    order = sorted(came, reverse=not forward)
    assert len(order) == layers == len(gone), f"piece {piece}: {len(order)} states came, {len(gone)} went"
    return [(1e-6 * came[layer], 1e-6 * gone[layer]) for layer in order]


def _spans(event: Event, scans: Sequence[tuple[float, float]]) -> Spans:
    start, end = 1e-6 * event["ts"], 1e-6 * (event["ts"] + event["dur"])
    return Spans(scans[0][0] - start, sum(b - a for a, b in scans), end - scans[-1][1], end - start)


def _typical(pieces: Iterable[Spans]) -> Spans:
    columns = zip(*pieces, strict=True)
    return Spans(*(median(column) for column in columns))


def _parts(spans: Spans, layers: int) -> tuple[float, float, float]:
    """Before a scan, the scan, after it: of one layer. Between two scans both others pass, in the ends' proportion."""
    rest = max(spans.all - spans.scans, 0.0) / layers
    share = spans.before / max(spans.before + spans.after, 1e-12)
    return rest * share, spans.scans / layers, rest * (1.0 - share)
