"""What one training step reads: a Batch of rows with named fields, and the Row it is made of.

This file holds data only. How rows are cut out of token files is in packing.py; who gets which row is in data.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..parallel.cut import Cut


@dataclass(frozen=True)
class Row:
    """One sample before it is shifted into inputs and labels; what a row transform takes and gives.

    tokens     int64 [T + 1], the row and the one token after it
    loss_mask  float32 [T + 1]; loss_mask[i] weighs the loss of *predicting* tokens[i] (entry 0 is never used)
    starts     int64 [n], ascending positions in 1 .. T at which another document starts; empty when packing is plain
    reset      position 0 starts from a fresh state (always, unless a lane goes on in the middle of a document)
    """

    tokens: Tensor
    loss_mask: Tensor
    starts: Tensor
    reset: bool = True


@dataclass(frozen=True)
class Batch:
    """Rows of one microbatch on one data-parallel rank.

    tokens      int64 [b, T]
    labels      int64 [b, T], the next token of each position
    loss_mask   float32 [b, T], weight of each position's loss; 0 where the label belongs to another document
    cu_seqlens  None (state runs through), or b int64 tensors [0, document starts inside the row .., T]
    reset       bool [b], False where the row goes on from the state its lane had after the batch before
    lanes       int64 [b], the lane a row belongs to; rows of one lane follow each other in time (ordered packing only)
    samples     int64 [b], global sample numbers, the same on any number of ranks
    cut, rank   where rows are walked in pieces: which, and whose slice this is; cu_seqlens are of the whole rows
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    cu_seqlens: list[Tensor] | None
    reset: Tensor
    lanes: Tensor
    samples: Tensor
    cut: Cut | None = None
    rank: int = 0

    def __post_init__(self) -> None:
        b, length = self.tokens.shape
        assert self.labels.shape == self.loss_mask.shape == (b, length), "tokens, labels and loss_mask differ in shape"
        assert self.reset.shape == self.lanes.shape == self.samples.shape == (b,), "reset, lanes, samples are per row"
        assert self.cu_seqlens is None or len(self.cu_seqlens) == b, "cu_seqlens has one entry a row"

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with tokens, labels and loss_mask on `device`; row descriptions stay on the host."""
        return replace(
            self,
            tokens=self.tokens.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
            loss_mask=self.loss_mask.to(device, non_blocking=True),
        )

    @property
    def row_tokens(self) -> int:
        """Tokens of a whole row."""
        return self.tokens.shape[1] if self.cut is None else self.cut.tokens

    def places(self) -> Tensor:
        """int64 [T]: where in its row each token here stands."""
        return torch.arange(self.tokens.shape[1]) if self.cut is None else self.cut.places(self.rank)


def cut_for_rank(batch: Batch, cut: Cut, rank: int) -> Batch:
    """The slice of `rank`: its pieces of every row, one after the other."""

    def own(x: Tensor) -> Tensor:
        return x if cut.ranks == 1 else torch.cat([x[:, cut.bounds[p] : cut.bounds[p + 1]] for p in cut.mine(rank)], 1)

    return replace(
        batch,
        tokens=own(batch.tokens),
        labels=own(batch.labels),
        loss_mask=own(batch.loss_mask),
        cut=cut,
        rank=rank,
    )


def collate(rows: list[Row], lanes: list[int], samples: list[int], *, boundaries: bool) -> Batch:
    """Shift rows into inputs and labels and stack them.

    rows        b rows of equal length T + 1
    boundaries  give cu_seqlens (packing with resets) or None (packing without)
    """
    tokens = torch.stack([row.tokens for row in rows])
    mask = torch.stack([row.loss_mask for row in rows])
    length = tokens.shape[1] - 1
    return Batch(
        tokens=tokens[:, :-1].contiguous(),
        labels=tokens[:, 1:].contiguous(),
        loss_mask=mask[:, 1:].contiguous(),
        cu_seqlens=[cut_points(row.starts, length) for row in rows] if boundaries else None,
        reset=torch.tensor([row.reset for row in rows], dtype=torch.bool),
        lanes=torch.tensor(lanes, dtype=torch.int64),
        samples=torch.tensor(samples, dtype=torch.int64),
    )


def cut_points(starts: Tensor, length: int) -> Tensor:
    """Document starts inside a row of `length` tokens as int64 cumulative lengths [0, .., length], ascending."""
    inside = starts[starts < length]
    return torch.cat([torch.tensor([0]), inside.to(torch.int64), torch.tensor([length])])
