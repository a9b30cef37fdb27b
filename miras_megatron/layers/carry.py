"""How a layer's state crosses from one slice of a sequence to the next.

A layer hands its carry two things: streams of which it needs the last few rows to the left
(`left_contexts`), and a scan with the state it starts from (`run`). `LocalCarry` is for a process that
holds whole sequences; ranks that share a sequence bring their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from .documents import Documents

Scan = Callable[[Any, Any, Documents | None, slice], tuple[Tensor, Any]]
"""(inputs, state, documents, heads) -> (outputs, state after the last token), for those heads alone."""

Streams = Mapping[str, Tensor]


class StateCarry(Protocol):
    """What a layer asks of the world beyond its slice.

    before     per batch row how many tokens of its first document are to the left, where this carry brings their
               state; 0: the row begins a document here. None: a state passed to the layer says it
    passes_on  whether the state after the last token is wanted to the right
    """

    before: list[int] | None
    passes_on: bool

    def left_contexts(
        self, streams: Streams, width: int, previous: Mapping[str, Any], documents: Documents | None
    ) -> dict[str, Tensor]:
        """The `width` rows before each stream's first token, zeros where there are none.

        streams [B, T, ...] of one layer that are known at the same time, and so may cross together; previous: a state
        with rows [B, width, ...] under the same names, or without; returns [B, width, ...] of each stream's dtype.
        """
        ...

    def run(
        self, scan: Scan, inputs: Any, state: Any, documents: Documents | None = None, heads: int = 1
    ) -> tuple[Tensor, Any]:
        """`scan(inputs, state, documents, ..)`, from the state at the end of the slice to the left where there is one.

        state  where a sequence starts: it has the shapes of every later state, batch in dim 0
        heads  how many heads may be scanned apart, inputs and state being `MemoryInputs` and `MemoryState`;
               1: the scan is one piece
        """
        ...


class LocalCarry:
    """The whole sequence is here: nothing to fetch, nothing to wait for."""

    before: list[int] | None = None
    passes_on = False

    def left_contexts(
        self, streams: Streams, width: int, previous: Mapping[str, Any], documents: Documents | None
    ) -> dict[str, Tensor]:
        """What the state brought, or zeros."""
        return {
            name: previous[name].to(x.dtype) if name in previous else empty_context(x, width)
            for name, x in streams.items()
        }

    def run(
        self, scan: Scan, inputs: Any, state: Any, documents: Documents | None = None, heads: int = 1
    ) -> tuple[Tensor, Any]:
        """The scan, as it is."""
        return scan(inputs, state, documents, ALL_HEADS)


def empty_context(x: Tensor, width: int) -> Tensor:
    """Zeros [B, width, ...] for x [B, T, ...]: nothing was before it."""
    return x.new_zeros(x.shape[0], width, *x.shape[2:])


ALL_HEADS = slice(None)
LOCAL = LocalCarry()
