"""Halos of carries that keep whole slices, one a rank: the left neighbour's own rows, for which nobody waits long."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from miras_megatron.layers.carry import Streams, empty_context
from miras_megatron.layers.documents import Documents

from .carry_relay import RelayCarry


class SliceCarry(RelayCarry):
    """A `StateCarry` whose halos go to the right before those from the left are waited for.

    So nobody waits for a chain of ranks, as a relay does anyway; only a slice shorter than the halo has to.
    """

    def left_contexts(
        self, streams: Streams, width: int, previous: Mapping[str, Any], documents: Documents | None
    ) -> dict[str, Tensor]:
        """The last rows of the slices to the left."""
        if width == 0 or any(x.shape[1] < width for x in streams.values()):
            return super().left_contexts(streams, width, previous, documents)
        assert not previous, "a slice is given no state"
        empty, slot = {name: empty_context(x, width) for name, x in streams.items()}, self._next_slot()
        self._to_right(slot, streams, empty, documents)
        return self._from_left(slot, empty)
