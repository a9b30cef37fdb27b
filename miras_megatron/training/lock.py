"""An advisory lock on a file, which the system drops when its holder dies; the file says who holds it."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from typing import TextIO


class Held(Exception):
    """The lock stayed with somebody else; `str` says with whom."""


def take_lock(file: TextIO, patience: float) -> None:
    """Lock `file`, opened to append and read, and write down who holds it.

    patience  seconds to wait for its holder. Raises Held after them, OSError where the file system can't lock
    """
    give_up = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > give_up:
                file.seek(0)
                raise Held(file.read().strip() or "another process") from None
            time.sleep(0.05)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
