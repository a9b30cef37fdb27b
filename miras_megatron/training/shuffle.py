"""Order without replay: hashes and permutations that are pure functions of (seed, what, index).

Nothing here hangs on a library's random stream, so an order of today is the order after any upgrade, and element n is
found without walking over the n - 1 before it. That is what makes resume exact and free.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(*values: int) -> int:
    """One well-mixed 64-bit number of several integers (splitmix64, chained)."""
    state = 0
    for value in values:
        state = (state ^ (value & _MASK)) + _GOLDEN & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def shuffled(count: int, key: int) -> NDArray[np.int64]:
    """The numbers 0 .. count - 1 in an order that hangs on `key` alone; int64 [count]."""
    state = (np.arange(count, dtype=np.uint64) ^ np.uint64(mix(key))) + np.uint64(_GOLDEN)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return np.argsort(state, kind="stable").astype(np.int64)


def permute(index: int, count: int, key: int) -> int:
    """Where `index` goes in a permutation of 0 .. count - 1 chosen by `key`, in constant memory.

    A four-round Feistel network on the next even number of bits, walked until the result is below `count`: a bijection.
    """
    assert 0 <= index < count, f"index {index} is not below count {count}"
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    value = index
    while True:
        left, right = value >> half, value & low
        for turn in range(4):
            left, right = right, left ^ (mix(key, turn, right) & low)
        value = left << half | right
        if value < count:
            return value
