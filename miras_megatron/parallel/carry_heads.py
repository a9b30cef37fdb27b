"""The trade: ranks that share a sequence trade their tokens for heads, and each scans whole rows with its heads.

    rank r: all heads of its tokens  --->  each rank j: its heads of all tokens  | scan |  and the reads back

Any rule whose heads are independent may do this; what crosses are activations, and heads must divide by the ranks.
Convolutions and windows take the rows they need from the left neighbour.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from miras_megatron.layers.carry import ALL_HEADS, Scan
from miras_megatron.layers.documents import Documents
from miras_megatron.layers.memory_core import HeadScan
from miras_megatron.memory.state import MemoryInputs

from .carry_slices import SliceCarry


class HeadsCarry(SliceCarry):
    """A `StateCarry` for memories with independent heads whose slices are contiguous, one a rank."""

    def run(
        self, scan: Scan, inputs: Any, state: Any, documents: Documents | None = None, heads: int = 1
    ) -> tuple[Tensor, Any]:
        """Trade tokens for heads, scan, trade back; the state is that of this rank's heads after the whole row.

        Raises ValueError where the block's scan is more than a memory's, or ranks can't share its heads.
        """
        if not isinstance(scan, HeadScan):
            raise ValueError(
                "carry 'heads' takes memories alone, no MAC (letter c) and no write_persistent: use 'relay'"
            )
        passage = self.passage
        if passage.pieces == 1:
            return scan(inputs, state, documents, ALL_HEADS)
        if heads % passage.pieces:
            raise ValueError(
                f"carry 'heads': {heads} heads here can't be shared by {passage.pieces} ranks; make model.heads / "
                "parallel.tensor a multiple of parallel.context, or use 'relay'"
            )
        assert passage.cut is not None
        count = heads // passage.pieces
        own = slice(passage.piece * count, (passage.piece + 1) * count)
        trade = Trade(passage.piece, [passage.cut.length(p) for p in range(passage.pieces)], passage.group)
        rows = Documents.of(passage.documents, inputs.q.shape[0], passage.cut.tokens)
        reads, after = scan(_trade_inputs(trade, inputs), state.heads(own), rows, own)
        return _traded(reads, trade.to_tokens, trade.to_heads), after


Way = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Trade:
    """rank: this one; lengths: tokens of each rank's slice; group: theirs."""

    rank: int
    lengths: Sequence[int]
    group: Any

    def to_heads(self, x: Tensor) -> Tensor:
        """[B, tokens here, N, X] -> [B, all tokens, N / ranks, X]."""
        batch, _, heads, width = x.shape
        ranks = len(self.lengths)
        own = heads // ranks
        outgoing = x.detach().unflatten(2, (ranks, own)).permute(2, 1, 0, 3, 4).contiguous()
        incoming = x.new_empty(sum(self.lengths), batch, own, width)
        sizes = [length * batch * own * width for length in self.lengths]
        self._exchange(incoming, outgoing, sizes, [sizes[self.rank]] * ranks)
        return incoming.transpose(0, 1)

    def to_tokens(self, x: Tensor) -> Tensor:
        """[B, all tokens, N / ranks, X] -> [B, tokens here, N, X]."""
        batch, _, own, width = x.shape
        ranks = len(self.lengths)
        outgoing = x.detach().transpose(0, 1).contiguous()
        incoming = x.new_empty(ranks, self.lengths[self.rank], batch, own, width)
        sizes = [length * batch * own * width for length in self.lengths]
        self._exchange(incoming, outgoing, [sizes[self.rank]] * ranks, sizes)
        return incoming.permute(2, 1, 0, 3, 4).flatten(2, 3)

    def _exchange(self, incoming: Tensor, outgoing: Tensor, come: list[int], go: list[int]) -> None:
        dist.all_to_all_single(incoming.view(-1), outgoing.view(-1), come, go, group=self.group)


class Traded(torch.autograd.Function):
    """forward: what each rank j is to have    r  --->  j, for all j
    backward: its gradient the other way       r  <---  j

    there, back  the trade's two ways, either first
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Way, back: Way) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradients[0]), None, None


def _traded(x: Tensor, there: Way, back: Way) -> Tensor:
    apply: Any = Traded.apply
    traded: Tensor = apply(x, there, back)
    return traded


def _trade_inputs(trade: Trade, inputs: MemoryInputs) -> MemoryInputs:
    """The inputs of all tokens for this rank's heads; tensors of one dtype cross beside each other."""
    found: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        found.append(x)
        return x

    inputs.map(note)
    traded: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(x.dtype for x in found):
        places = [i for i, x in enumerate(found) if x.dtype == dtype]
        wide = [found[i] if found[i].dim() == 4 else found[i].unsqueeze(-1) for i in places]
        parts = _traded(torch.cat(wide, -1), trade.to_heads, trade.to_tokens).split([x.shape[-1] for x in wide], -1)
        traded |= {i: part if found[i].dim() == 4 else part.squeeze(-1) for i, part in zip(places, parts, strict=True)}
    ordered = iter([traded[i] for i in range(len(found))])
    return inputs.map(lambda x: next(ordered))
