"""What a piece received, kept until it is computed again: the only thing that grows with the sequence.

Kept on the device, or in host memory (copied there while the piece goes on, and back when it is replayed).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import torch
from torch import Tensor

Place = Literal["device", "host"]

BLOCK = 1 << 26
"""Bytes a pool takes at once: more than glibc ever takes from its heap. So only pages that are written count, and a
block goes back to the system with the last packet in it."""

ALIGN = 64
"""bytes; every tensor in a block begins at a multiple"""


class Pool:
    """Room for copies that live long among short-lived tensors.

    On a heap each of these would keep the room around it from being used again: at 2M tokens in pieces of 8K that is
    several times what the copies take.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[torch.device, bool], tuple[Tensor, int]] = {}

    def copy(self, x: Tensor, *, pinned: bool = False) -> Tensor:
        """A copy of `x`, without history; pinned: in host memory, which may still be under way there."""
        home, size = torch.device("cpu") if pinned else x.device, x.numel() * x.element_size()
        if home.type != "cpu":
            return x.detach().clone()  # CUDA's allocator has pools of its own
        block, used = self._blocks.get((home, pinned), (None, 0))
        if block is None or used + size > block.numel():
            block, used = torch.empty(max(BLOCK, size), dtype=torch.uint8, device=home, pin_memory=pinned), 0
        self._blocks[home, pinned] = (block, used + -(-size // ALIGN) * ALIGN)
        place = torch.empty(0, dtype=x.dtype, device=home)
        # Not a view of the block: autograd would take all copies in it for one tensor.
        dense = x.detach().contiguous()
        place.set_(block.untyped_storage(), used // x.element_size(), dense.shape, dense.stride())
        return place.copy_(dense, non_blocking=pinned)


class Tape:
    """Packets by key, of one piece.

    pool  where they are copied to; None: they are kept as they come
    """

    def __init__(self, place: Place = "device", pool: Pool | None = None) -> None:
        self.place, self.pool = place, pool
        self._kept: dict[Hashable, tuple[list[Tensor], list[torch.device]]] = {}

    def keep(self, key: Hashable, tensors: Sequence[Tensor]) -> None:
        """Remember `tensors` under `key`, once."""
        assert key not in self._kept, f"{key} was received twice"
        devices = [x.device for x in tensors]
        self._kept[key] = ([self._put(x) for x in tensors], devices)

    def read(self, key: Hashable) -> list[Tensor]:
        """What was kept, on the device it came from."""
        tensors, devices = self._kept[key]
        return [x.to(device, non_blocking=True) for x, device in zip(tensors, devices, strict=True)]

    @property
    def bytes(self) -> int:
        """Held now."""
        return sum(x.numel() * x.element_size() for tensors, _ in self._kept.values() for x in tensors)

    def _put(self, x: Tensor) -> Tensor:
        pinned = self.place == "host" and x.device.type != "cpu"
        if self.pool is not None or pinned:
            return (self.pool or Pool()).copy(x, pinned=pinned)
        return x
