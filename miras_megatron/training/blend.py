"""Which set a sample comes from, and which documents of a set are for training, validation and test."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PERIOD = 10_000
PARTS = ("train", "validation", "test")


class Blend:
    """Spreads samples over sets in proportion to weights, in closed form.

    A pattern of PERIOD samples repeats: it holds every set as often as its weight says (to 1 in PERIOD, never less than
    once) and evenly spread, so that any run of n samples is within about one sample of the weights.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.quotas = apportion(weights, PERIOD if len(weights) > 1 else 1)
        self.period = int(self.quotas.sum())
        self._pattern = _spread(self.quotas)
        self._before = np.zeros((self.period, len(weights)), dtype=np.int64)
        taken = np.zeros(len(weights), dtype=np.int64)
        for place, chosen in enumerate(self._pattern):
            self._before[place] = taken
            taken[chosen] += 1

    def locate(self, sample: int) -> tuple[int, int]:
        """(set, how many samples of that set came before) of a global sample number."""
        rounds, place = divmod(sample, self.period)
        chosen = int(self._pattern[place])
        return chosen, rounds * int(self.quotas[chosen]) + int(self._before[place, chosen])


def apportion(weights: Sequence[float], total: int) -> NDArray[np.int64]:
    """Whole shares of `total` by largest remainder, int64 [n]; a weight above 0 gets one at least if total allows."""
    share: NDArray[np.float64] = np.asarray(weights, dtype=np.float64)
    share = share / share.sum() * total
    whole: NDArray[np.int64] = np.floor(share + 1e-9).astype(np.int64)
    for index in np.argsort(whole - share, kind="stable")[: total - int(whole.sum())]:
        whole[index] += 1
    for index in np.flatnonzero((whole == 0) & (share > 0)):
        if whole.max() > 1:
            whole[int(whole.argmax())] -= 1
            whole[index] = 1
    return whole


def split_documents(count: int, shares: Sequence[float], part: str) -> tuple[int, int]:
    """[first, last) documents of `part`; the parts are contiguous, in the order of PARTS, and share no document.

    A part with a share above 0 gets at least one document when there are enough.
    """
    counts = apportion(shares, count)
    place = PARTS.index(part)
    return int(counts[:place].sum()), int(counts[: place + 1].sum())


def _spread(quotas: NDArray[np.int64]) -> NDArray[np.int64]:
    """A sequence with every set as often as its quota, each at even distances; int64 [sum of quotas]."""
    ideal = [(np.arange(quota) + 0.5) / quota for quota in quotas]
    owner = np.repeat(np.arange(len(quotas)), quotas)
    return owner[np.argsort(np.concatenate(ideal), kind="stable")]
