"""Output that nobody reads any more, as of `command | head`: the command ends quietly, as other tools do."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable

UNREAD = 141
"""Exit code, as a shell tells it of a tool that SIGPIPE ends."""


def quiet_when_unread(work: Callable[[], int]) -> int:
    """What `work` returns; UNREAD where the reader of its output left before all was said. Other pipes' errors pass."""
    try:
        code = work()
        sys.stdout.flush()  # here, since Python would complain of it at its end
    except BrokenPipeError:
        if not _has_no_reader():
            raise
        discard_output()
        return UNREAD
    return code


def printed(text: str) -> int:
    """Print it all; 0, or UNREAD."""

    def work() -> int:
        print(text)
        return 0

    return quiet_when_unread(work)


def discard_output() -> None:
    """Let go of what is still to be written; Python flushes once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _has_no_reader() -> bool:
    """Whether standard output is a pipe that nobody reads."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # no file of the system, such as in a test
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
