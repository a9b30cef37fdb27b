"""The relay: a piece goes on from the state that its left neighbour ends with, whatever the rule.

    forward   rank r: receive the state | scan | send the state        --->  rank r + 1
    backward  rank r: receive its gradient | backward | send gradient  <---  rank r + 1

Receiving and sending are nodes of the autograd graph, so that gradients leave as soon as they are known. A piece that
is computed again takes what it received from its tape and sends nothing: a replay never communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from miras_megatron.layers.carry import ALL_HEADS, Scan, Streams, empty_context
from miras_megatron.layers.documents import CuSeqlens, Documents, last_rows
from miras_megatron.memory.state import join_heads

from .cut import Cut
from .exchange import Key, StateRing
from .tape import Tape
from .trace import Recorder


@dataclass
class Passage:
    """One piece on its way through the layers of this rank.

    piece, pieces  which of how many in the whole row
    before         per batch row the tokens of its first document to the left
    head_groups    in how many parts a memory's heads are scanned and sent
    order          what every receive hangs on in the graph; its gradient is always zero
    tape           what was received, kept for a replay; None: nothing is kept
    recalls        receives are answered from the tape
    silent         nothing is sent to the right
    roots          one number a packet, to be differentiated along with the output: no packet's gradient is left out
    cut, documents the whole row's pieces and cu_seqlens
    group          the process group of the ranks that share a row, for carries that need all of them at once
    recorder       of spans, for a trace
    kind           makes a layer's carry; None: the relay's
    """

    ring: StateRing
    micro_batch: int
    piece: int
    pieces: int
    before: list[int]
    head_groups: int = 1
    order: Tensor | None = None
    tape: Tape | None = None
    recalls: bool = False
    silent: bool = False
    roots: list[Tensor] = field(default_factory=list)
    cut: Cut | None = None
    documents: CuSeqlens = None
    group: Any = None
    recorder: Recorder = field(default_factory=Recorder)
    kind: Callable[[Passage, int], RelayCarry] | None = None

    def carry(self, layer: int) -> RelayCarry:
        """What layer `layer` (from 1) is given."""
        return (self.kind or RelayCarry)(self, layer)

    def key(self, border: int, layer: int, slot: int) -> Key:
        """Of a packet at the left border of piece `border`."""
        return Key(self.micro_batch, border, layer, slot)

    def take(self, layer: int, slot: int, like: Sequence[Tensor]) -> list[Tensor]:
        """What the piece to the left handed on, of the shapes of `like`."""
        key = self.key(self.piece, layer, slot)
        if not torch.is_grad_enabled():
            return self.fetch(key, like)
        apply: Any = Take.apply
        root, *taken = apply(self.order, self, key, *like)
        self.roots.append(root)
        return list(taken)

    def give(self, layer: int, slot: int, leaves: Sequence[Tensor]) -> None:
        """Hand `leaves` to the piece to the right."""
        key = self.key(self.piece + 1, layer, slot)
        if not torch.is_grad_enabled():
            if not self.silent:
                self.ring.send("right", key, leaves)
            return
        apply: Any = Give.apply
        self.roots.append(apply(self.order, self, key, *leaves))

    def fetch(self, key: Key, like: Sequence[Tensor]) -> list[Tensor]:
        """From the tape, or from the neighbour and onto the tape."""
        if self.recalls:
            assert self.tape is not None
            return self.tape.read(key)
        received = self.ring.receive("right", key, like)
        if self.tape is not None:
            self.tape.keep(key, received)
        return received


class RelayCarry:
    """A `StateCarry` for one layer and one piece; slots number its exchanges in the order of the layer's calls."""

    def __init__(self, passage: Passage, layer: int):
        self.passage, self.layer, self._slots = passage, layer, 0
        self.before = passage.before if passage.piece > 0 else None
        self.passes_on = passage.piece < passage.pieces - 1

    def left_contexts(
        self, streams: Streams, width: int, previous: Mapping[str, Any], documents: Documents | None
    ) -> dict[str, Tensor]:
        """The last rows of the piece to the left, all streams in one packet; this piece's go to the right at once."""
        assert not previous, "a relayed piece is given no state"
        contexts = {name: empty_context(x, width) for name, x in streams.items()}
        if width == 0:
            return contexts
        slot = self._next_slot()
        contexts = self._from_left(slot, contexts)
        self._to_right(slot, streams, contexts, documents)
        return contexts

    def _from_left(self, slot: int, empty: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.before is None:
            return empty
        received = self.passage.take(self.layer, slot, list(empty.values()))
        chosen: dict[str, Tensor] = restart(dict(zip(empty, received, strict=True)), empty, self.before)
        return chosen

    def _to_right(self, slot: int, streams: Streams, contexts: Streams, documents: Documents | None) -> None:
        if self.passes_on:
            rows = [last_rows(contexts[name], x, documents) for name, x in streams.items()]
            self.passage.give(self.layer, slot, rows)

    def run(
        self, scan: Scan, inputs: Any, state: Any, documents: Documents | None = None, heads: int = 1
    ) -> tuple[Tensor, Any]:
        """Receive, scan, send; group of heads after group of heads where they are independent."""
        groups = min(self.passage.head_groups, heads)
        if groups == 1:
            return self._one(scan, inputs, state, documents, ALL_HEADS)
        bounds = [heads * i // groups for i in range(groups + 1)]
        outputs, states = [], []
        for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
            chosen = slice(start, stop)
            out, after = self._one(scan, inputs.heads(chosen), state.heads(chosen), documents, chosen)
            outputs.append(out)
            states.append(after)
        return torch.cat(outputs, 2), join_heads(states)

    def _one(
        self, scan: Scan, inputs: Any, state: Any, documents: Documents | None, heads: slice
    ) -> tuple[Tensor, Any]:
        slot = self._next_slot()
        if self.before is not None:
            received = iter(self.passage.take(self.layer, slot, tensors_of(state)))
            state = restart(pytree.tree_map_only(Tensor, lambda x: next(received), state), state, self.before)
        with self.passage.recorder.span("scan", f"layer {self.layer}", piece=self.passage.piece, part=slot):
            out, after = scan(inputs, state, documents, heads)
        if self.passes_on:
            self.passage.give(self.layer, slot, tensors_of(after))
        return out, after

    def _next_slot(self) -> int:
        self._slots += 1
        return self._slots - 1


def tensors_of(state: Any) -> list[Tensor]:
    """The tensors of a state, in the order of its tree."""
    return [x for x in pytree.tree_leaves(state) if isinstance(x, Tensor)]


def restart(received: Any, start: Any, before: list[int]) -> Any:
    """`received`, but `start` in the rows that begin a document: their gradient to the left is zero."""
    if all(before):
        return received
    goes_on = torch.tensor([tokens > 0 for tokens in before])

    def choose(old: Any, new: Any) -> Any:
        if not isinstance(old, Tensor):
            return old
        return torch.where(goes_on.to(old.device)[(...,) + (None,) * (old.dim() - 1)], old, new)

    return pytree.tree_map(choose, received, start)


def outlines(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of the same shape, dtype and device that hold one element: what a later packet looks like."""
    return [x.new_zeros(()).expand(x.shape) for x in tensors]


class Take(torch.autograd.Function):
    """forward: receive `leaves` from the left (or read the tape)   <---  rank r - 1
    backward: send their gradients to the left                      --->  rank r - 1"""

    @staticmethod
    def forward(ctx: Any, order: Tensor, passage: Passage, key: Key, *like: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach() for x in passage.fetch(key, like)]
        ctx.passage, ctx.key, ctx.like = passage, key, outlines(leaves)
        ctx.mark_non_differentiable(*(x for x in leaves if not x.is_floating_point()))
        return torch.zeros_like(order), *leaves

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        pairs = [(x, g) for x, g in zip(ctx.like, gradients[1:], strict=True) if x.is_floating_point()]
        ctx.passage.ring.send("left", ctx.key, [torch.zeros_like(x) if g is None else g for x, g in pairs])
        return (None,) * (2 + len(gradients))


class Give(torch.autograd.Function):
    """forward: send `leaves` to the right (or be silent)       --->  rank r + 1
    backward: receive their gradients from the right            <---  rank r + 1"""

    @staticmethod
    def forward(ctx: Any, order: Tensor, passage: Passage, key: Key, *leaves: Tensor) -> Tensor:
        ctx.passage, ctx.key = passage, key
        ctx.like = outlines(leaves)
        if not passage.silent:
            passage.ring.send("right", key, leaves)
        return torch.zeros_like(order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [x for x in ctx.like if x.is_floating_point()]
        received = iter(ctx.passage.ring.receive("left", ctx.key, wanted))
        return None, None, None, *(next(received) if x.is_floating_point() else None for x in ctx.like)
