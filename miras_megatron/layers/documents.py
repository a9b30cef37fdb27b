"""Documents inside rows: where they start, and row-wise surgery on states.

cu_seqlens counts from 0 to T. The first document of a row goes on from the state that comes in, every
later one starts anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..memory.lanes import border_rows, read_borders

CuSeqlens = Tensor | Sequence[Tensor] | None
"""Document starts and, last, T: one int64 tensor for all rows or one per row; None: one document.
The first document of a row goes on from the state that comes in, every later one starts anew."""

FAR = 1 << 60
"""Added to the place of tokens of a row's first document: what is to their left is theirs too."""


@dataclass(frozen=True)
class Documents:
    """The documents of B rows of T tokens.

    starts  per row the first token of every document, ascending, the first is 0
    """

    starts: tuple[tuple[int, ...], ...]
    tokens: int

    @classmethod
    def of(cls, cu_seqlens: CuSeqlens, batch: int, tokens: int) -> Documents | None:
        """From document borders; None where every row is one document. Raises ValueError on bad borders."""
        if cu_seqlens is None:
            return None
        rows = border_rows(cu_seqlens, batch)
        if len(rows) != batch:
            raise ValueError(f"cu_seqlens: {len(rows)} rows for a batch of {batch}; give one tensor, or one per row")
        starts = tuple(_starts(read_borders(i, row), tokens) for i, row in enumerate(rows))
        return None if all(row == (0,) for row in starts) else cls(starts, tokens)

    @property
    def borders(self) -> list[Tensor]:
        """cu_seqlens, one int64 tensor per row."""
        return [torch.tensor([*row, self.tokens]) for row in self.starts]

    def place(self, device: torch.device | str = "cpu") -> Tensor:
        """[B, T] int64: tokens since the document's start; counted from FAR in the first document."""
        place = torch.arange(self.tokens).repeat(len(self.starts), 1)
        for row, starts in zip(place, self.starts, strict=True):
            for start, stop in zip(starts, [*starts[1:], self.tokens], strict=True):
                row[start:stop] += FAR if start == 0 else -start
        return place.to(device)


def _starts(borders: list[int], tokens: int) -> tuple[int, ...]:
    if not borders or borders[0] != 0 or borders[-1] != tokens or borders != sorted(borders):
        raise ValueError(f"cu_seqlens = {borders}: must ascend from 0 to the number of tokens ({tokens})")
    return tuple(sorted(set(borders[:-1]) - {tokens})) or (0,)


def last_rows(context: Tensor, x: Tensor, documents: Documents | None) -> Tensor:
    """The last W rows of [context; x] that belong to the last document, zeros where it is shorter.

    context [B, W, ...] the rows before x; x [B, T, ...]
    """
    width = context.shape[1]
    rows = torch.cat([context[:, min(x.shape[1], width) :], x[:, max(0, x.shape[1] - width) :]], 1)
    if documents is None or width == 0:
        return rows
    length = torch.tensor(
        [documents.tokens - starts[-1] + (FAR if starts[-1] == 0 else 0) for starts in documents.starts]
    )
    real = torch.arange(width, 0, -1) <= length[:, None]
    return rows * real.to(rows)[(...,) + (None,) * (rows.dim() - 2)]


def select_rows(tree: Any, index: Sequence[int]) -> Any:
    """The batch rows `index` of every tensor of a state."""
    chosen = torch.tensor(index, dtype=torch.int64)
    return pytree.tree_map(lambda x: x.index_select(0, chosen.to(x.device)) if isinstance(x, Tensor) else x, tree)


def join_trees(trees: Sequence[Any]) -> Any:
    """One state with the batch rows of all, in order."""
    if len(trees) == 1:
        return trees[0]
    return pytree.tree_map(lambda *x: torch.cat(x) if isinstance(x[0], Tensor) else x[0], *trees)
