"""Buffers of the hand-written scan, by name: the next tile overwrites what the last one no longer needs.

Fresh memory is cold: a tile's operands fill the cache only when they lie where the last tile's lay.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Workspace:
    """Buffers that keep their memory as long as their shapes stay; contents are the taker's."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._buffers: dict[tuple[str, int], Tensor] = {}

    def take(self, name: str, i: int, *shape: int) -> Tensor:
        """The buffer `name` of matrix i, uninitialised."""
        known = self._buffers.get((name, i))
        if known is None or known.shape != shape:
            known = self._buffers[name, i] = self._like.new_empty(shape)
        return known

    def bmm(self, name: str, i: int, left: Tensor, right: Tensor) -> Tensor:
        """left @ right."""
        return torch.bmm(left, right, out=self.take(name, i, left.shape[0], left.shape[1], right.shape[2]))
