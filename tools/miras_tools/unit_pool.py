"""Runs units in worker processes that hold a tokenizer each, and end when their parent is killed."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from miras_megatron.training.tokenizer import Tokenizer, load_tokenizer

from .preprocess_parts import Counts, tokenise_unit
from .text_sources import Keys, Slice


@dataclass(frozen=True)
class Job:
    """One unit to do; stem: where its part files go (None: a dry run)."""

    number: int
    unit: tuple[Slice, ...]
    stem: str | None


@dataclass(frozen=True)
class Work:
    """What all units share; it crosses to the workers once."""

    tokenizer: str
    eod: str | None
    keys: Keys
    append_eod: bool
    dtype: np.dtype[Any]


def run_jobs(jobs: Sequence[Job], work: Work, workers: int) -> Iterator[tuple[int, Counts]]:
    """(unit number, counts) as units end, in any order; the first error ends all.

    Raises ValueError of a unit as it is, and BrokenProcessPool when a worker dies.
    """
    if workers == 1 or len(jobs) < 2:
        tokenizer = load_tokenizer(work.tokenizer, work.eod)
        for job in jobs:
            yield job.number, _do(job, work, tokenizer)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(jobs)), context, _begin, (work, os.getpid())) as pool:
        waiting = list(reversed(jobs))
        running: dict[Future[Counts], int] = {}
        try:
            while waiting or running:
                while waiting and len(running) < 2 * workers:
                    job = waiting.pop()
                    running[pool.submit(_in_worker, job)] = job.number
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _do(job: Job, work: Work, tokenizer: Tokenizer) -> Counts:
    return tokenise_unit(job.unit, work.keys, tokenizer, work.append_eod, job.stem, work.dtype)


class _Worker:
    """What a worker process keeps between units."""

    work: Work
    tokenizer: Tokenizer


def _begin(work: Work, parent: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _Worker.work, _Worker.tokenizer = work, load_tokenizer(work.tokenizer, work.eod)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _in_worker(job: Job) -> Counts:
    return _do(job, _Worker.work, _Worker.tokenizer)


def _end_with(parent: int) -> None:
    """A parent that is killed cannot tell its workers; they notice that they have another one."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
