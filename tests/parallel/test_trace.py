"""A trace that can't be opened, or shows ranks at the wrong times, misleads whoever looks for the wait."""

from __future__ import annotations

import json

from miras_megatron.parallel.exchange import Key, Wait
from miras_megatron.parallel.trace import Recorder, chrome_trace


def test_a_trace_shows_spans_and_waits_of_every_rank() -> None:
    """Chrome's format: complete events with begin and length in microseconds, a process a rank."""
    recorder = Recorder(on=True)
    with recorder.span("piece", "forward 0"), recorder.span("scan", "layer 1", piece=0):
        pass
    events = recorder.take([Wait(Key(0, 1, 2, 0), "right", 10.0, 10.5)])
    assert recorder.take([]) == []
    trace = json.loads(json.dumps(chrome_trace([("cp0", events), ("cp1", events)])))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1}
    assert [event["name"] for event in spans[:3]] == ["layer 1", "forward 0", "wait for state"]
    assert spans[2]["dur"] == 5e5 and min(event["ts"] for event in spans) == 0.0


def test_nothing_is_recorded_while_it_is_off() -> None:
    """Timing every scan of every step would cost what it measures."""
    recorder = Recorder()
    with recorder.span("piece", "forward 0"):
        pass
    assert recorder.take([]) == []
