"""Signals to miras-launch go on to the launcher that it waits for: else the ranks outlive it, and save nothing."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

PASSED_ON = {
    "torchrun": {signal.SIGTERM: signal.SIGTERM, signal.SIGUSR1: signal.SIGTERM},  # USR1 would kill its agent alone
    "mpi": {signal.SIGTERM: signal.SIGTERM, signal.SIGUSR1: signal.SIGUSR1},
}
"""Launcher -> what it gets for what this process gets."""


@dataclass
class Ranks:
    """The launcher's process, once it runs."""

    process: subprocess.Popen[bytes] | None = None
    asked: int | None = None
    """the signal for it; one that came before it ran is sent when it does"""

    def ask(self, number: int) -> None:
        """Send it on, or keep it."""
        self.asked = number
        if self.process is not None:
            self.process.send_signal(number)

    def wait_for(self, process: subprocess.Popen[bytes]) -> int:
        """Its exit code, 128 more than the signal where one ended it. Ctrl-C it gets from the terminal itself."""
        self.process = process
        if self.asked is not None:
            process.send_signal(self.asked)
        while True:
            try:
                code = process.wait()
                break
            except KeyboardInterrupt:
                self.asked = signal.SIGINT
        self.process = None
        return code if code >= 0 else 128 - code


@contextmanager
def passed_on(launcher: str) -> Iterator[Ranks]:
    """Inside, signals go to whatever the Ranks wait for."""
    ranks = Ranks()

    def pass_on(number: int, frame: FrameType | None) -> None:
        ranks.ask(PASSED_ON[launcher][signal.Signals(number)])

    before = {number: signal.signal(number, pass_on) for number in PASSED_ON[launcher]}
    try:
        yield ranks
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)
