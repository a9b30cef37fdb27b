"""How far a conversion is: one line that is written over on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time


class TensorProgress:
    """Says "tensor k of n, MB" on standard error.

    count, total   tensors and bytes there are
    interval       seconds between lines where standard error is no terminal
    """

    def __init__(self, verb: str, count: int, total: int, interval: float = 5.0) -> None:
        self.verb, self.count, self.total, self.interval = verb, count, total, interval
        self._done, self._bytes = 0, 0
        self._live = sys.stderr.isatty()
        self._last = time.monotonic()

    def add(self, size: int) -> None:
        """One more tensor, of `size` bytes."""
        self._done += 1
        self._bytes += size
        last, now = self._done == self.count, time.monotonic()
        if not (last or self._live or now - self._last >= self.interval):
            return
        self._last = now
        line = (
            f"{self.verb} tensor {self._done} of {self.count}, {self._bytes / 1e6:,.1f} of {self.total / 1e6:,.1f} MB"
        )
        start, end = ("\r", "\n" if last else "") if self._live else ("", "\n")
        print(start + line, end=end, file=sys.stderr, flush=True)
