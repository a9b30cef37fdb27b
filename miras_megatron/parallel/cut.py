"""Where a sequence is cut: pieces of nearly equal length, piece p on rank p mod cp, and the documents inside one.

With one piece a rank this is the contiguous cut; with several a rank's slice is its pieces one after the other.
Slices are never zig-zag: a state goes through the tokens in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from miras_megatron.layers.documents import CuSeqlens


@dataclass(frozen=True)
class Cut:
    """The pieces of rows of `tokens` tokens.

    bounds  pieces + 1 places, from 0 to `tokens`, ascending
    ranks   how many share them
    """

    bounds: tuple[int, ...]
    ranks: int = 1

    @classmethod
    def even(cls, tokens: int, pieces: int, ranks: int = 1) -> Cut:
        """`pieces` pieces that differ by a token at most. Raises ValueError where there are fewer tokens."""
        if tokens < pieces:
            raise ValueError(f"{tokens} tokens can't be cut into {pieces} pieces")
        return cls(tuple(tokens * i // pieces for i in range(pieces + 1)), ranks)

    @property
    def tokens(self) -> int:
        """Of the whole row."""
        return self.bounds[-1]

    @property
    def pieces(self) -> int:
        """Over all ranks."""
        return len(self.bounds) - 1

    def mine(self, rank: int) -> range:
        """The pieces of a rank, in their order."""
        return range(rank, self.pieces, self.ranks)

    def length(self, piece: int) -> int:
        """Tokens of a piece."""
        return self.bounds[piece + 1] - self.bounds[piece]

    def lengths(self, rank: int) -> list[int]:
        """Tokens of each piece of a rank."""
        return [self.length(piece) for piece in self.mine(rank)]

    def places(self, rank: int) -> Tensor:
        """int64 [tokens here]: where in the row each token of the rank's slice stands."""
        return torch.cat([torch.arange(self.bounds[p], self.bounds[p + 1]) for p in self.mine(rank)])


def documents_of_piece(
    cu_seqlens: CuSeqlens, rows: int, start: int, stop: int
) -> tuple[list[Tensor] | None, list[int]]:
    """The documents inside tokens start..stop-1 of rows whose documents are `cu_seqlens`.

    returns  cu_seqlens of the piece, counted from its own token 0, and per row the tokens that its first document
             has to the left; 0: a document begins at `start`
    """
    if cu_seqlens is None:
        return None, [start] * rows
    borders = [cu_seqlens] * rows if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
    inside, before = [], []
    for row in borders:
        begins: Sequence[int] = sorted({int(b) for b in row[:-1]})
        inside.append(torch.tensor([0, *(b - start for b in begins if start < b < stop), stop - start]))
        before.append(start - max(b for b in begins if b <= start))
    return inside, before
