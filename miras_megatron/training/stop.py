"""A polite end: SIGTERM or SIGUSR1 (SLURM's warning) asks for a checkpoint and exit code 0 after this step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@dataclass
class StopRequest:
    """Whether this rank was asked to stop, and by which signal."""

    signal_name: str | None = None


@contextmanager
def listen_for_stop() -> Iterator[StopRequest]:
    """Catch the signals inside the block; outside, and off the main thread, they do what they did before."""
    request = StopRequest()

    def remember(number: int, frame: FrameType | None) -> None:
        request.signal_name = signal.Signals(number).name

    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, remember) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
