"""Halos of carries that keep whole slices, one a rank: the left neighbour's own rows, for which nobody waits long."""

from __future__ import annotations

from torch import Tensor

from miras_megatron.layers.documents import Documents, last_rows

from .carry_relay import RelayCarry, restart


class SliceCarry(RelayCarry):
    """A `StateCarry` whose halos go to the right before those from the left are waited for.

    So nobody waits for a chain of ranks, as a relay does anyway; only a slice shorter than the halo has to.
    """

    def left_context(self, x: Tensor, width: int, previous: Tensor | None, documents: Documents | None) -> Tensor:
        """The last rows of the slices to the left."""
        if x.shape[1] < width or width == 0:
            return super().left_context(x, width, previous, documents)
        assert previous is None, "a slice is given no state"
        context, slot = x.new_zeros(x.shape[0], width, *x.shape[2:]), self._next_slot()
        if self.passes_on:
            self.passage.give(self.layer, slot, [last_rows(context, x, documents)])
        if self.before is None:
            return context
        (received,) = self.passage.take(self.layer, slot, [context])
        chosen: Tensor = restart(received, context, self.before)
        return chosen
