"""If these fail, `command | head` ends in a traceback, or another broken pipe ends a command without a word."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from miras_megatron.config.unread import UNREAD, quiet_when_unread

WORK = """
import sys
from miras_megatron.config.unread import quiet_when_unread
def work():
    print("said", flush={flush})
    return 3
sys.exit(quiet_when_unread(work))
"""


@pytest.mark.parametrize("flush", [True, False])
def test_a_reader_that_left_is_no_traceback(flush: bool) -> None:
    """Neither where the command writes, nor where Python flushes at its end."""
    read, write = os.pipe()
    os.close(read)
    line = [sys.executable, "-c", WORK.format(flush=flush)]
    done = subprocess.run(line, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (UNREAD, "")


def test_what_is_read_is_what_was_said() -> None:
    """The code is the command's own."""
    line = [sys.executable, "-c", WORK.format(flush=False)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "said\n", "")


def test_another_pipe_that_breaks_is_told() -> None:
    """A worker that died is no reader that had enough."""

    def work() -> int:
        raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        quiet_when_unread(work)
