"""What a run reads, from configuration to batches: sets blended by weight, split by document, packed, dealt to ranks.

Batch n of rank r is a pure function of (files, settings, n, r). A position is therefore one number, `seek` is free,
and the batch after a resume is bit-equal to the one that an uninterrupted run would have seen, on any number of ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from ..config.schema import Run
from .batch import Batch, Row, collate
from .blend import Blend, apportion, split_documents
from .packing import OrderedRows, PackedRows
from .shipped import prepare_shipped_text
from .shuffle import mix
from .token_files import TokenFiles
from .tokenizer import Tokenizer

RowTransform = Callable[[int, Row, torch.Generator], Row]
"""(global sample number, row, generator seeded by (seed, sample number)) -> row of the same length: plants needles"""


class Samples(Protocol):
    """Numbered rows. `row(sample)` is pure; `boundaries` says whether batches carry cu_seqlens."""

    length: int
    lanes: int
    boundaries: bool
    fingerprint: str

    def row(self, sample: int) -> Row: ...


class MixedSamples:
    """Several sets as one numbered run of rows."""

    def __init__(
        self,
        sets: Sequence[TokenFiles],
        weights: Sequence[float],
        *,
        length: int,
        packing: str = "reset",
        split: Sequence[float] = (1.0, 0.0, 0.0),
        part: str = "train",
        seed: int = 0,
        lanes: int = 1,
    ) -> None:
        """length: T; lanes: rows of a global batch; split: shares by document, of which `part` is taken.

        Raises ValueError when a set has no document in that part, or too few for ordered packing.
        """
        self.length, self.lanes, self.packing = length, lanes, packing
        self.boundaries = packing != "plain"
        self._blend = Blend(weights)
        self._lane_homes = _lane_homes(weights, lanes, sets) if packing == "ordered" else []
        self._packed: list[PackedRows] = []
        self._ordered: list[OrderedRows] = []
        for number, files in enumerate(sets):
            documents = _documents_of(files, split, part)
            key = mix(seed, number)
            if packing == "ordered":
                own = sum(home == number for home, _ in self._lane_homes)
                self._ordered.append(OrderedRows(files, documents, length, key, lanes=own))
            else:
                self._packed.append(PackedRows(files, documents, length, key, resets=packing == "reset"))
        settings = [packing, length, list(split), part, seed, lanes if packing == "ordered" else 0, list(weights)]
        self.fingerprint = _fingerprint(settings, sets)

    @property
    def rows_per_epoch(self) -> list[int]:
        """Rows that one pass over each set gives (packings reset and plain)."""
        return [rows.rows_per_epoch for rows in self._packed]

    def row(self, sample: int) -> Row:
        """The row of a global sample number."""
        if self.packing == "ordered":
            step, lane = divmod(sample, self.lanes)
            home, own_lane = self._lane_homes[lane]
            return self._ordered[home].row(own_lane, step)
        chosen, number = self._blend.locate(sample)
        return self._packed[chosen].row(number)


class Batches:
    """The endless microbatches of one data-parallel rank.

    Microbatch n of rank r holds global samples n * size * micro_batch + r * micro_batch and on; one training step takes
    global_batch / (size * micro_batch) of them.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        micro_batch: int,
        rank: int = 0,
        size: int = 1,
        seed: int = 0,
        transform: RowTransform | None = None,
        workers: int = 0,
    ) -> None:
        """rank, size: of the data-parallel group; workers: threads that prepare batches ahead (0: none)."""
        assert 0 <= rank < size, f"rank {rank} of {size}"
        self.samples, self.micro_batch, self.rank, self.size = samples, micro_batch, rank, size
        self.seed, self.transform, self.workers = seed, transform, workers
        self.number = 0
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: deque[Future[Batch]] = deque()

    def batch(self, number: int) -> Batch:
        """Microbatch `number` of this rank."""
        first = (number * self.size + self.rank) * self.micro_batch
        numbers = list(range(first, first + self.micro_batch))
        rows = [self._row(sample) for sample in numbers]
        lanes = [sample % self.samples.lanes for sample in numbers]
        return collate(rows, lanes, numbers, boundaries=self.samples.boundaries)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = self._next_prepared() if self.workers else self.batch(self.number)
        self.number += 1
        return batch

    def position(self) -> dict[str, Any]:
        """Where the next batch comes from, as plain JSON; equal on all ranks."""
        return {"samples": self.number * self.size * self.micro_batch, "fingerprint": self.samples.fingerprint}

    def seek(self, state: dict[str, Any]) -> None:
        """Go on from a `position()`, also one of another number of ranks or microbatch size.

        Raises ValueError when it belongs to other data or settings, or falls inside a microbatch of this layout.
        """
        if state["fingerprint"] != self.samples.fingerprint:
            reason = "the checkpoint's data position belongs to other files, tokenizer, packing, split, seed or lengths"
            raise ValueError(f"checkpoint.resume: {reason}; set data.* as in the first run, or start with init_from")
        stride = self.size * self.micro_batch
        number, rest = divmod(int(state["samples"]), stride)
        if rest:
            reason = (
                f"{state['samples']} samples were read, which is no multiple of {self.size} ranks x {self.micro_batch}"
            )
            raise ValueError(f"training.micro_batch = {self.micro_batch}: {reason}; choose a layout that divides it")
        self._ahead.clear()
        self.number = number

    def _row(self, sample: int) -> Row:
        row = self.samples.row(sample)
        if self.transform is None:
            return row
        generator = torch.Generator().manual_seed(mix(self.seed, 3, sample) >> 1)
        changed = self.transform(sample, row, generator)
        assert changed.tokens.shape == row.tokens.shape, "a row transform keeps the length of the row"
        return changed

    def _next_prepared(self) -> Batch:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="data")
        while len(self._ahead) <= self.workers:
            self._ahead.append(self._pool.submit(self.batch, self.number + len(self._ahead)))
        return self._ahead.popleft().result()


def build_batches(
    run: Run,
    tokenizer: Tokenizer,
    *,
    part: str = "train",
    rank: int = 0,
    size: int = 1,
    micro_batch: int | None = None,
    length: int | None = None,
    transform: RowTransform | None = None,
) -> Batches:
    """The batches a configuration describes.

    part     "train", "validation" or "test"; validation comes from data.validation where that is set, else from
             data.split. Rows of the last two always start afresh (packing reset where data.packing is ordered).
    length   T, when it is not data.sequence_length
    Raises ValueError naming the field, the file and the way out.
    """
    data = run.data
    own = part == "validation" and data.validation_blend is not None
    blend = data.validation_blend if own and data.validation_blend is not None else data.train_blend
    field = "data.validation" if own else "data.train"
    sets = [_open_set(run, prefix, field, tokenizer) for _, prefix in blend]
    samples = MixedSamples(
        sets,
        [weight for weight, _ in blend],
        length=length or data.sequence_length,
        packing="reset" if part != "train" and data.packing == "ordered" else data.packing,
        split=(1.0, 0.0, 0.0) if own or (part == "train" and data.validation is not None) else data.split_shares,
        part="train" if own else part,
        seed=data.seed,
        lanes=run.training.global_batch,
    )
    b = micro_batch or run.training.micro_batch
    workers = data.workers if part == "train" else 0
    return Batches(samples, micro_batch=b, rank=rank, size=size, seed=data.seed, transform=transform, workers=workers)


def _open_set(run: Run, prefix: str, field: str, tokenizer: Tokenizer) -> TokenFiles:
    if prefix == "shipped":
        cache, decides = run.data.cache, f"data.cache = {run.data.cache}"
        if cache is None:
            cache, decides = str(Path(run.run.dir) / "cache"), f"run.dir = {run.run.dir}"
        prefix = prepare_shipped_text(cache, tokenizer, field=decides)
    vocab_size = run.model.vocab_size or tokenizer.vocab_size
    return TokenFiles(prefix, vocab_size=vocab_size, tokenizer_digest=tokenizer.digest, field=field)


def _documents_of(files: TokenFiles, split: Sequence[float], part: str) -> np.ndarray:
    """Documents of `part` that hold tokens, int64; raises ValueError when there is none."""
    first, last = split_documents(len(files.lengths), split, part)
    documents = np.arange(first, last, dtype=np.int64)
    documents = documents[files.lengths[documents] > 0]
    if not len(documents):
        shares = ",".join(f"{100 * share:g}" for share in split)
        reason = f"data.split = {shares!r} by document leaves none of its {len(files.lengths)} documents for {part}"
        way_out = f"give {part} a larger share, cut the text into more documents, or set data.validation"
        raise ValueError(f"{files.field} = {files.prefix!r}: {reason}; {way_out}")
    return documents


def _lane_homes(weights: Sequence[float], lanes: int, sets: Sequence[TokenFiles]) -> list[tuple[int, int]]:
    """For every lane, its set and its number among the lanes of that set."""
    counts = apportion(weights, lanes)
    for files, count in zip(sets, counts, strict=True):
        if count == 0:
            reason = f'data.packing = "ordered": {lanes} lanes are too few to give one to {files.prefix!r}'
            raise ValueError(f"{reason}; raise training.global_batch or drop the set")
    return [(home, own) for home, count in enumerate(counts) for own in range(count)]


def _fingerprint(settings: list[Any], sets: Sequence[TokenFiles]) -> str:
    """A hash of everything that decides which row a sample number is; paths do not count, so files may move."""
    contents = [[len(files.lengths), int(files.lengths.sum()), mix(*files.lengths[:1000].tolist())] for files in sets]
    return hashlib.sha256(json.dumps([settings, contents]).encode()).hexdigest()[:32]
