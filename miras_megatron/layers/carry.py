"""How a layer's state crosses from one slice of a sequence to the next.

A layer hands its carry two things: streams of which it needs the last few rows to the left
(`left_context`), and a scan with the state it starts from (`run`). `LocalCarry` is for a process that
holds whole sequences; ranks that share a sequence bring their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from torch import Tensor

Inputs = TypeVar("Inputs")
Outputs = TypeVar("Outputs")
State = TypeVar("State")

CuSeqlens = Tensor | Sequence[Tensor] | None
"""Document starts and, last, T: one int64 tensor for all rows or one per row; None: one document.
The first document of a row goes on from the state that comes in, every later one starts anew."""


class StateCarry(Protocol):
    """What a layer asks of the world beyond its slice.

    whole  a state of None means that there is nothing to the left
    """

    whole: bool

    def left_context(self, x: Tensor, width: int, previous: Tensor | None, cu_seqlens: CuSeqlens) -> Tensor:
        """The `width` rows before x's first token, zeros where there are none.

        x [B, T, ...] the stream here; previous [B, width, ...] the rows a state brought, or None; returns
        [B, width, ...] of x's dtype.
        """
        ...

    def run(
        self, scan: Callable[[Inputs, State], tuple[Outputs, State]], inputs: Inputs, state: State
    ) -> tuple[Outputs, State]:
        """`scan(inputs, state)`, from the state at the end of the slice to the left where there is one."""
        ...


class LocalCarry:
    """The whole sequence is here: nothing to fetch, nothing to wait for."""

    whole = True

    def left_context(self, x: Tensor, width: int, previous: Tensor | None, cu_seqlens: CuSeqlens) -> Tensor:
        """What the state brought, or zeros."""
        return x.new_zeros(x.shape[0], width, *x.shape[2:]) if previous is None else previous.to(x.dtype)

    def run(
        self, scan: Callable[[Inputs, State], tuple[Outputs, State]], inputs: Inputs, state: State
    ) -> tuple[Outputs, State]:
        """The scan, as it is."""
        return scan(inputs, state)
