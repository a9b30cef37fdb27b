"""A stream taken span by span, the way into the memory recomputed in backward: what a layer keeps there is its input.

Between a layer's input and its scan lie projections, convolutions, norms and gates, whose results are several times as
large as the input and cheap beside the scan. Taken span by span, they and their gradients live only while their span
is worked on, and so do the states that the scan keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

Step = Callable[[Tensor, Any, bool], tuple[Sequence[Tensor], Any]]
"""(x of a span, state, replays) -> (outputs [B, T, ...], state after it). Where it `replays` it must end with the scan
that doesn't walk (`replay_scan`): all that autograd keeps is then what was kept the first time."""

LEAST_TOKENS = 512
"""Tokens of the shortest span: fewer make small products, and a recomputation has a fixed cost"""


def walk_spans(step: Step, x: Tensor, state: Any, chunk_size: int, every: int) -> tuple[list[Tensor], Any]:
    """`step` over the spans of x [B, T, d], from `state`: its outputs for all tokens, and the state after them."""
    pieces = []
    for part in x.split(span_tokens(chunk_size, every), 1):
        span = _Span(step, part, state)
        with saved_tensors_hooks(span.number, span.recall):
            outputs, state = step(part, state, False)
        pieces.append(outputs)
    return [torch.cat(one, 1) for one in zip(*pieces, strict=True)], state


def span_tokens(chunk_size: int, every: int) -> int:
    """Tokens of a span: whole stretches between two states that a scan would keep."""
    between = chunk_size * every
    return between * -(-LEAST_TOKENS // between)


class _Span:
    """Stands for what autograd keeps of one span: numbers in its place, and how to compute it again.

    torch's own checkpoint does the same, but imports its compiler, which takes more memory than is saved here.
    """

    def __init__(self, step: Step, x: Tensor, state: Any) -> None:
        self.step, self.x, self.state = step, x, state
        self.numbered = 0
        self.recalled: dict[int, Tensor] = {}

    def number(self, kept: Tensor) -> int:
        """What is kept of the first walk: that it was the n-th."""
        self.numbered += 1
        return self.numbered - 1

    def recall(self, number: int) -> Tensor:
        """The n-th tensor, for one use."""
        if number not in self.recalled:
            self._replay()
        return self.recalled.pop(number)

    def _replay(self) -> None:
        found: list[Tensor] = []

        def note(kept: Tensor) -> None:
            found.append(kept.detach())

        with torch.enable_grad(), saved_tensors_hooks(note, _unwanted):
            self.step(_leaf(self.x), pytree.tree_map_only(Tensor, _leaf, self.state), True)
        assert len(found) == self.numbered, f"a span kept {self.numbered} tensors, and {len(found)} when replayed"
        self.recalled = dict(enumerate(found))


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.requires_grad)


def _unwanted(kept: None) -> Tensor:
    raise AssertionError("nothing goes back through a replay")
