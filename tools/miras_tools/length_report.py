"""What a person sees of a preprocessing run: progress while it goes, a table of document lengths at the end."""

from __future__ import annotations

import sys
import time

from .preprocess_parts import Counts


class Progress:
    """One line that renews itself on a terminal; elsewhere a plain line every `interval` seconds and at the end."""

    def __init__(self, units: int, interval: float) -> None:
        self._units, self._interval = units, interval
        self._start = self._shown = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def show(self, done: int, counts: Counts, fresh_bytes: int) -> None:
        """done: units; fresh_bytes: text read by this run, without what an earlier one had done."""
        now = time.monotonic()
        last = done == self._units
        if not last and now - self._shown < (0.2 if self._terminal else self._interval):
            return
        self._shown = now
        rate = fresh_bytes / max(now - self._start, 1e-3)
        left = (self._units - done) * (now - self._start) / max(done, 1)
        line = f"{done}/{self._units} units  {counts.documents:,} documents  {counts.tokens:,} tokens"
        line += f"  {rate / 1e6:.1f} MB/s" + ("" if last else f"  {left:.0f} s left")
        if self._terminal:
            print(f"\r\x1b[K{line}", end="\n" if last else "", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)


def describe(counts: Counts) -> str:
    """Documents, tokens, bytes a token, and a histogram of document lengths, as lines of text."""
    lines = [
        f"documents   {counts.documents:>15,}" + (f"  ({counts.empty:,} empty ones left out)" if counts.empty else ""),
        f"tokens      {counts.tokens:>15,}",
        f"text bytes  {counts.text_bytes:>15,}",
        f"bytes/token {counts.text_bytes / max(counts.tokens, 1):>15.3f}",
    ]
    if counts.prompts:
        lines.append(f"with prompt {counts.prompts:>15,}")
    return "\n".join([*lines, "", *_histogram(counts)])


def _histogram(counts: Counts) -> list[str]:
    lines = ["document length (tokens)       documents   share of tokens"]
    for bucket in sorted(counts.histogram):
        share = counts.histogram_tokens[bucket] / max(counts.tokens, 1)
        span = f"{bucket:>12,} - {2 * bucket - 1:<12,}"
        lines.append(f"{span} {counts.histogram[bucket]:>12,}   {100 * share:6.1f} %  {'#' * round(40 * share)}")
    return lines
