"""Cuts documents into rows. Row n is a pure function of (files, settings, n): nothing is walked to find it.

PackedRows   `reset` and `plain`: the epoch's documents, shuffled and joined, are cut into rows, which are shuffled too
OrderedRows  `ordered`: every lane owns documents and reads them in order, row after row

Document starts inside a row go along with it; what becomes of them (a reset or nothing) is decided by the caller.
"""

from __future__ import annotations

import logging
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from .batch import Row
from .shuffle import mix, permute, shuffled
from .token_files import TokenFiles

log = logging.getLogger(__name__)


class Joined:
    """Documents in a given order, seen as one long run of tokens."""

    def __init__(self, files: TokenFiles, order: NDArray[np.int64]) -> None:
        self.files = files
        self.order = order
        self.ends = np.cumsum(files.lengths[order])

    @property
    def tokens(self) -> int:
        return int(self.ends[-1])

    def read(self, start: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.float32], list[int]]:
        """Tokens and masks of [start, start + count), with the positions among them where a document starts."""
        assert 0 <= start <= start + count <= self.tokens, "read beyond the last document"
        pieces: list[NDArray[np.int64]] = []
        masks: list[NDArray[np.float32]] = []
        starts: list[int] = []
        place, done = int(np.searchsorted(self.ends, start, side="right")), 0
        while done < count:
            document = int(self.order[place])
            offset = start + done - (int(self.ends[place]) - int(self.files.lengths[document]))
            take = min(count - done, int(self.ends[place]) - start - done)
            if offset == 0:
                starts.append(done)
            pieces.append(self.files.read(document, offset, take))
            masks.append(self.files.read_mask(document, offset, take))
            done, place = done + take, place + 1
        return np.concatenate(pieces), np.concatenate(masks), starts


class PackedRows:
    """Shuffled documents joined and cut into rows of T (+ 1 for the label of the last position).

    An epoch gives (tokens - 1) // T rows; its last tokens, fewer than T, are left to other epochs in other orders.
    A set shorter than a row is repeated within it.
    """

    def __init__(self, files: TokenFiles, documents: NDArray[np.int64], length: int, key: int, *, resets: bool) -> None:
        """documents: int64, those of this split, none empty; key: decides both shuffles."""
        self.files, self.documents, self.length, self.key, self.resets = files, documents, length, key, resets
        tokens = int(files.lengths[documents].sum())
        self.repeats = -(-(length + 1) // tokens)
        self.rows_per_epoch = (tokens * self.repeats - 1) // length
        self._joined = lru_cache(maxsize=2)(self._join)

    def row(self, number: int) -> Row:
        epoch, index = divmod(number, self.rows_per_epoch)
        place = permute(index, self.rows_per_epoch, mix(self.key, 1, epoch))
        tokens, mask, starts = self._joined(epoch).read(place * self.length, self.length + 1)
        inner = [start for start in starts if start > 0] if self.resets else []
        return make_row(tokens, mask, inner, reset=True)

    def _join(self, epoch: int) -> Joined:
        orders = [shuffled(len(self.documents), mix(self.key, 0, epoch, turn)) for turn in range(self.repeats)]
        return Joined(self.files, self.documents[np.concatenate(orders)])


class OrderedRows:
    """Long documents in order: each lane owns whole documents and reads them from start to end, row after row.

    Documents are dealt to the lanes once, longest first, to and fro, so that lanes are of like length; each lane then
    goes through its own documents again and again, in an order shuffled anew for every round.
    """

    def __init__(self, files: TokenFiles, documents: NDArray[np.int64], length: int, key: int, *, lanes: int) -> None:
        """Raises ValueError when there are fewer documents than lanes."""
        self.files, self.length, self.key, self.lanes = files, length, key, lanes
        if len(documents) < lanes:
            reason = f'data.packing = "ordered": {files.prefix} has {len(documents)} documents for {lanes} lanes'
            raise ValueError(f"{reason}; lower training.global_batch, give more documents, or use packing reset")
        self.owned = deal(documents, files.lengths, lanes)
        self.totals = [int(files.lengths[owned].sum()) for owned in self.owned]
        if max(self.totals) > 2 * min(self.totals):
            uneven = (
                "lanes hold %d to %d tokens, so the shorter ones are seen more often; more documents or fewer lanes"
            )
            log.warning("%s: " + uneven, files.prefix, min(self.totals), max(self.totals))
        self._joined = lru_cache(maxsize=2 * lanes)(self._join)

    def row(self, lane: int, step: int) -> Row:
        """The `step`-th row of a lane; its first token follows the last but one of the row before."""
        tokens, mask, starts = self._read(lane, step * self.length, self.length + 1)
        return make_row(tokens, mask, [start for start in starts if start > 0], reset=starts[:1] == [0])

    def _read(self, lane: int, start: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.float32], list[int]]:
        """Like Joined.read, over the endless rounds of a lane."""
        parts, starts, done = [], [], 0
        while done < count:
            turn, offset = divmod(start + done, self.totals[lane])
            take = min(count - done, self.totals[lane] - offset)
            tokens, mask, inside = self._joined(lane, turn).read(offset, take)
            parts.append((tokens, mask))
            starts += [done + position for position in inside]
            done += take
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts]), starts

    def _join(self, lane: int, turn: int) -> Joined:
        owned = self.owned[lane]
        return Joined(self.files, owned[shuffled(len(owned), mix(self.key, 2, lane, turn))])


def deal(documents: NDArray[np.int64], lengths: NDArray[np.int64], lanes: int) -> list[NDArray[np.int64]]:
    """Hand documents to lanes, longest first: 0, 1 .. n - 1, n - 1 .. 1, 0, 0, 1 .. ; lane -> int64 documents."""
    longest_first = documents[np.argsort(-lengths[documents], kind="stable")]
    place = np.arange(len(documents)) % (2 * lanes)
    owner = np.where(place < lanes, place, 2 * lanes - 1 - place)
    return [longest_first[owner == lane] for lane in range(lanes)]


def make_row(tokens: NDArray[np.int64], mask: NDArray[np.float32], starts: list[int], *, reset: bool) -> Row:
    """A Row whose loss skips the first token of every document that starts inside: nothing before it tells of it.

    tokens [T + 1], mask [T + 1], starts: positions in 1 .. T
    """
    weights = mask.copy()
    weights[starts] = 0.0
    return Row(torch.from_numpy(tokens), torch.from_numpy(weights), torch.tensor(starts, dtype=torch.int64), reset)
