"""A polite end: SIGTERM or SIGUSR1 (SLURM's warning) asks for a checkpoint and exit code 0 after this step.

Commands that have nothing to save end at once, but tidy up.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

Handler = Callable[[int, FrameType | None], None]


@dataclass
class StopRequest:
    """Whether this rank was asked to stop, and by which signal."""

    signal_name: str | None = None


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Inside, SIGTERM is SystemExit(143): what was begun is tidied up, as after any other exception."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _handled((signal.SIGTERM,), leave):
        yield


@contextmanager
def listen_for_stop(speaks: bool = True) -> Iterator[StopRequest]:
    """Catch the signals inside the block; outside, and off the main thread, they do what they did before.

    speaks  says at once that it was heard: a step may take minutes
    Once one has come they stay caught after the block, until a `handlers_restored` around it ends: a second one would
    end with its own code a run that has saved and takes its groups down.
    """
    request = StopRequest()

    def remember(number: int, frame: FrameType | None) -> None:
        if speaks and request.signal_name is None:
            # not print: the signal may have come in the middle of one
            os.write(2, f"{signal.Signals(number).name}: saves and stops after this step\n".encode())
        request.signal_name = signal.Signals(number).name

    with _handled(SIGNALS, remember, restored=lambda: request.signal_name is None):
        yield request


def ignore_signals() -> None:
    """From now on they don't end this process, until a `handlers_restored` around it ends; off the main thread nothing.

    For an end that has begun: torchrun sends SIGTERM to all ranks as soon as one has died.
    """
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def handlers_restored() -> Iterator[None]:
    """After the block signals do what they did before it."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, usual in before.items():
                signal.signal(number, usual)


@contextmanager
def _handled(
    signals: Sequence[signal.Signals], handler: Handler, restored: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        if restored():
            for number, usual in before.items():
                signal.signal(number, usual)
