"""Which microbatches a rank reads at a step: rows of the usual length or, at a planned share of steps, longer ones.

A step's kind is a pure function of its number, so that all ranks and every resumed run agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..config.schema import Run
from .batch import Batch
from .data import Batches, RowTransform, build_batches
from .shuffle import mix
from .tokenizer import Tokenizer


@dataclass
class Feed:
    """The microbatches of one data-parallel rank.

    usual       rows of data.sequence_length, `count` microbatches a step
    long        rows so many times longer, `long_count` microbatches a step; None where there are none
    long_share  share of steps that read `long`
    seed        decides which steps
    """

    usual: Batches
    count: int
    long: Batches | None = None
    long_count: int = 0
    long_share: float = 0.0
    seed: int = 0

    def is_long(self, step: int) -> bool:
        """Whether update `step` (from 1) reads long rows."""
        return self.long is not None and mix(self.seed, 4, step) / 2**64 < self.long_share

    def step(self, step: int) -> list[Batch]:
        """The microbatches of update `step`; call it once a step, in order."""
        source, count = (self.long, self.long_count) if self.is_long(step) else (self.usual, self.count)
        assert source is not None
        return [next(source) for _ in range(count)]

    def position(self) -> dict[str, Any]:
        """Where the next step reads, as plain values; equal on all ranks."""
        return {"usual": self.usual.position()} | ({"long": self.long.position()} if self.long is not None else {})

    def rows(self) -> int:
        """Rows that were read so far, over all ranks; also those that a roll back left out."""
        return sum(int(part["samples"]) for part in self.position().values())

    def seek(self, position: dict[str, Any]) -> None:
        """Go on from a `position()`. Raises ValueError where it belongs to other data."""
        self.usual.seek(position["usual"])
        if self.long is not None:
            self.long.seek(position["long"])


def make_feed(run: Run, tokenizer: Tokenizer, *, rank: int, ranks: int, plant: RowTransform | None = None) -> Feed:
    """The feed a configuration describes, for data-parallel `rank` of `ranks`.

    plant  changes rows as they are read (needles). Raises ValueError naming field and file.
    """
    usual = build_batches(run, tokenizer, rank=rank, size=ranks, transform=plant)
    count = run.training.global_batch // (run.training.micro_batch * ranks)
    needles = run.data.needles
    if needles is None or needles.long_rows == 0:
        return Feed(usual, count)
    if run.data.packing == "ordered":
        raise ValueError(
            f'data.packing = "ordered" with data.needles.long_rows = {needles.long_rows}: a lane goes on from rows of '
            f"its own length only; set data.needles.long_rows to 0, or data.packing to reset"
        )
    micro, long_count = long_sizes(run, ranks)
    length = run.data.sequence_length * needles.long_factor
    long = build_batches(run, tokenizer, rank=rank, size=ranks, micro_batch=micro, length=length, transform=plant)
    return Feed(usual, count, long, long_count, needles.long_rows, run.data.seed)


def long_sizes(run: Run, ranks: int) -> tuple[int, int]:
    """Rows of a microbatch and microbatches of a step, on a rank, where rows are long: about the usual tokens."""
    assert run.data.needles is not None
    micro = max(run.training.micro_batch // run.data.needles.long_factor, 1)
    rows = max(run.training.global_batch // run.data.needles.long_factor // ranks, 1)
    return micro, max(rows // micro, 1)
