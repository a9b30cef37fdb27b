"""What each rank did in a step, as a trace that Chrome and Perfetto draw: the wavefront of a relay can be seen in it.

A span is a piece's forward, replay or backward, the scan of a layer inside one, or a wait for a neighbour.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .exchange import Wait

Event = dict[str, Any]

LANES = {"piece": 0, "scan": 1, "wait": 2}
"""Kind of span -> its line under the rank."""


@dataclass
class Recorder:
    """Spans of one rank while `on`; nothing is recorded, and nothing timed, while it is off."""

    on: bool = False
    events: list[Event] = field(default_factory=list)

    @contextmanager
    def span(self, kind: str, name: str, **details: Any) -> Iterator[None]:
        """Record what happens inside under `name`."""
        if not self.on:
            yield
            return
        began = time.perf_counter()
        yield
        self.add(kind, name, began, time.perf_counter(), details)

    def add(self, kind: str, name: str, began: float, ended: float, details: dict[str, Any]) -> None:
        """One span; times of time.perf_counter, in seconds."""
        offset = time.time() - time.perf_counter()
        self.events.append(
            {
                "name": name,
                "cat": kind,
                "ph": "X",
                "ts": 1e6 * (began + offset),
                "dur": 1e6 * (ended - began),
                "tid": LANES[kind],
                "args": details,
            }
        )

    def take(self, waits: Sequence[Wait]) -> list[Event]:
        """The events so far with `waits` among them; they are forgotten here."""
        for wait in waits:
            way = "state" if wait.direction == "right" else "gradient"
            self.add("wait", f"wait for {way}", wait.began, wait.ended, wait.key._asdict())
        events, self.events = self.events, []
        return events


def chrome_trace(ranks: Sequence[tuple[str, Sequence[Event]]]) -> dict[str, Any]:
    """The JSON of a trace: per rank its name and events; microseconds since the first event of any."""
    start = min((event["ts"] for _, events in ranks for event in events), default=0.0)
    found: list[Event] = []
    for number, (name, events) in enumerate(ranks):
        found.append({"name": "process_name", "ph": "M", "pid": number, "args": {"name": f"rank {number} {name}"}})
        found += [
            {"name": "thread_name", "ph": "M", "pid": number, "tid": tid, "args": {"name": lane}}
            for lane, tid in LANES.items()
        ]
        found += [{**event, "pid": number, "ts": event["ts"] - start} for event in events]
    return {"traceEvents": found, "displayTimeUnit": "ms"}
