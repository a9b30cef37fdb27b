"""What a piece received, kept until it is computed again: the only thing that grows with the sequence.

Kept on the device, or in host memory (copied there while the piece goes on, and back when it is replayed).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import torch
from torch import Tensor

Place = Literal["device", "host"]


class Tape:
    """Packets by key, of one piece."""

    def __init__(self, place: Place = "device") -> None:
        self.place = place
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
        if self.place == "device" or x.device.type == "cpu":
            return x
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        host.copy_(x, non_blocking=True)
        return host
