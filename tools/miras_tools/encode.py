"""Ids of a document that comes in pieces, never tokenised as one string, and equal to those of the whole string.

Bytes have no memory, so any cut will do. A tokenizer.json looks left and right: windows overlap, and two windows are
joined where both put a token border and agree on the tokens around it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from miras_megatron.training.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer

WINDOW = 1 << 16
"""characters that are new in a window"""
OVERLAP = 1 << 10
"""characters that a window shares with the one before"""
AGREE = 8
"""tokens on either side of a joint that both windows must have alike"""


def encode_pieces(tokenizer: Tokenizer, pieces: Iterable[str]) -> Iterator[NDArray[np.int64]]:
    """Ids of the text that `pieces` make up, as arrays; memory is that of a window, whatever the length."""
    clean = (without_surrogates(piece) for piece in pieces)
    if isinstance(tokenizer, JsonTokenizer):
        yield from _encode_windows(tokenizer, clean)
        return
    for piece in clean:
        for start in range(0, len(piece), WINDOW):
            yield _encode_bytes(tokenizer, piece[start : start + WINDOW])


def _encode_bytes(tokenizer: Tokenizer, text: str) -> NDArray[np.int64]:
    if isinstance(tokenizer, ByteTokenizer):
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)
    return np.array(tokenizer.encode(text), dtype=np.int64)


class _Window:
    """A tokenised stretch of text: ids and, for each, where in the document it begins (-1: inside a character)."""

    def __init__(self, tokenizer: JsonTokenizer, text: str, start: int) -> None:
        self.text, self.start = text, start
        self.ids, spans = tokenizer.encode_with_offsets(text)
        ends = [0, *(end for _, end in spans)]
        borders = zip(ends[:-1], (first for first, _ in spans), strict=True)
        self.borders = [start + end if first >= end else -1 for end, first in borders]
        self.taken = 0
        """ids before this one are given out or belong to the window before"""


def _encode_windows(tokenizer: JsonTokenizer, pieces: Iterable[str]) -> Iterator[NDArray[np.int64]]:
    windows = _windows(pieces)
    first, second = next(windows, (0, "")), next(windows, None)
    if second is None:
        yield np.array(tokenizer.encode(first[1]), dtype=np.int64)
        return
    held = _Window(tokenizer, first[1], first[0])
    for start, text in chain([second], windows):
        stop, window = _join(tokenizer, held, _Window(tokenizer, text, start))
        yield np.array(held.ids[held.taken : stop], dtype=np.int64)
        held = window
    yield np.array(held.ids[held.taken :], dtype=np.int64)


def _windows(pieces: Iterable[str]) -> Iterator[tuple[int, str]]:
    """(start, text) of windows of WINDOW + OVERLAP characters; each starts OVERLAP before the end of the last."""
    start, text = 0, ""
    for piece in pieces:
        for place in range(0, len(piece), WINDOW):
            text += piece[place : place + WINDOW]
            while len(text) > WINDOW + OVERLAP:
                yield start, text[: WINDOW + OVERLAP]
                start, text = start + WINDOW, text[WINDOW:]
    if text:
        yield start, text


def _join(tokenizer: JsonTokenizer, left: _Window, right: _Window) -> tuple[int, _Window]:
    """Where `left` stops, and the window that goes on there: `right`, or a new one where the two never agree."""
    middle = right.start + OVERLAP // 2
    places = {border: index for index, border in enumerate(right.borders) if border >= right.start}
    shared = [index for index, border in enumerate(left.borders) if index >= left.taken and border in places]
    for stop in sorted(shared, key=lambda index: abs(left.borders[index] - middle)):
        other = places[left.borders[stop]]
        reach = min(AGREE, stop, other)
        if left.ids[stop - reach : stop + AGREE] == right.ids[other - reach : other + AGREE] and reach:
            right.taken = other
            return stop, right
    inside = [index for index, border in enumerate(left.borders) if index > left.taken and border >= right.start]
    stop = min(inside, key=lambda index: abs(left.borders[index] - middle), default=len(left.ids))
    border = left.borders[stop] if inside else left.start + len(left.text)
    return stop, _Window(tokenizer, right.text[border - right.start :], border)


def without_surrogates(text: str) -> str:
    """Lone surrogates, which JSON can name and UTF-8 cannot hold, become U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
