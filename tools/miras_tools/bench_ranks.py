"""Processes that build a run once and take one of its steps whenever they are asked: what miras-bench times.

A group is one job of as many gloo ranks as it is given cores, one thread and, where the system allows, one core each.
Several groups may live at once, so that rounds can alternate between them without starting anything anew. None of them
outlives the process that started it, whatever ended that: an orphan would take the cores from the next measurement.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

from miras_megatron.config.schema import Run

Answer = dict[str, Any]

START_DEADLINE = 600.0
"""seconds until a rank has imported its libraries and built its model"""
STEP_DEADLINE = 3600.0
"""seconds a step, or a comparison, may take"""
PACKETS, PACKET_ARRIVES = 32, 0.01
"""packets of a size that are timed; seconds in which one has surely come"""
NO_LAYER = 0
"""layers are counted from 1, so a model's packets are never mistaken for those that are timed"""


class Ranks:
    """One job. Raises ValueError with a rank's traceback where one fails, or names the deadline it missed."""

    def __init__(self, run: Run, cores: Sequence[int | None]) -> None:
        """cores: of each rank, None: any."""
        context, port = multiprocessing.get_context("spawn"), _free_port()
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank, core in enumerate(cores):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, run, rank, len(cores), port, core), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def ready(self) -> list[Answer]:
        """What every rank says of itself once it is built; see `describe`."""
        return self.answers(START_DEADLINE)

    def ask(self, task: str, **options: Any) -> None:
        """Let every rank begin one of TASKS; `answers` fetches what comes of it."""
        for pipe in self._pipes:
            pipe.send((task, options))

    def answers(self, deadline: float = STEP_DEADLINE) -> list[Answer]:
        """What the ranks answer, in their order."""
        end, found = time.monotonic() + deadline, []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, end - time.monotonic())):
                raise ValueError(f"rank {rank} did not answer within {deadline:.0f} s; is the machine busy?")
            try:
                good, answer = pipe.recv()
            except EOFError:
                raise ValueError(f"rank {rank} died; out of memory?") from None
            if not good:
                raise ValueError(f"rank {rank} failed:\n{answer}")
            found.append(answer)
        return found

    def close(self, patience: float = 5.0) -> None:
        """End all ranks; one that works has `patience` seconds to come to the end of its step."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(patience)
            process.kill()
            process.join()


@contextmanager
def started(runs: Sequence[tuple[Run, Sequence[int | None]]]) -> Iterator[list[Ranks]]:
    """Groups that live at once, each (run, cores of its ranks), one started after the other.

    After a failure, or Ctrl-C, nobody waits for the end of a step.
    """
    groups: list[Ranks] = []
    try:
        for run, cores in runs:
            groups.append(Ranks(run, cores))
        yield groups
    except BaseException:
        for group in groups:
            group.close(patience=0.0)
        raise
    for group in groups:
        group.close()


def usable_cores(count: int) -> list[int | None]:
    """`count` cores, taken in turn from those that this process may use; None each where none can be chosen."""
    if not hasattr(os, "sched_getaffinity"):
        return [None] * count
    own = sorted(os.sched_getaffinity(0))
    return [own[i % len(own)] for i in range(count)]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# -- a rank's side ------------------------------------------------------------------------------------
def _serve(pipe: Connection, run: Run, rank: int, size: int, port: int, core: int | None) -> None:
    """A rank's life: build, then answer until the pipe closes. torch is imported on the core it will use."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if core is not None:
        os.sched_setaffinity(0, {core})
    sys.stdout = sys.stderr
    try:
        with _built(run, rank, size, port) as job:
            pipe.send((True, describe(job)))
            while True:
                try:
                    task, options = pipe.recv()
                except EOFError:
                    return
                pipe.send((True, TASKS[task](job, **options)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def _end_with_parent() -> None:
    """End this process in the middle of whatever it does, once the one that started it is gone, killed even."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a rank is started by multiprocessing"
    parent.join()
    os._exit(1)


@contextmanager
def _built(run: Run, rank: int, size: int, port: int) -> Iterator[Any]:
    import torch

    from miras_megatron.compat.cpu import core_without_cuda
    from miras_megatron.parallel.mesh import ParallelMesh
    from miras_megatron.parallel.rendezvous import RankInfo
    from miras_megatron.training.build_job import build_job
    from miras_megatron.training.tokenizer import with_vocabulary

    torch.set_num_threads(1)
    info = RankInfo(rank=rank, world_size=size, local_rank=rank, local_size=size, port=port, launcher="miras-bench")
    with core_without_cuda(), ParallelMesh(run.parallel, info, device="cpu") as mesh:
        job = build_job(with_vocabulary(run), mesh)
        _warm_up(job.model)
        mesh.barrier("the start of a benchmark")
        yield job


def _warm_up(model: Any) -> None:
    """What only a process's first pass takes, such as importing sympy in backward, belongs to its start."""
    import torch

    relay, model.relay = model.relay, None
    tokens = torch.zeros(1, 128, dtype=torch.int64)
    torch.autograd.grad(model(tokens, labels=tokens).sum(), list(model.parameters()), allow_unused=True)
    model.relay = relay


def describe(job: Any) -> Answer:
    """The decided layout, parameters, and MiB held before the first step."""
    layout = job.layout
    return {
        "carry": layout.carry,
        "pieces": layout.pieces,
        "head_groups": layout.head_groups,
        "reason": layout.reason,
        "parameters": sum(p.numel() for p in job.model.parameters()),
        "start_mib": memory_mib("VmRSS"),
    }


def step(job: Any, number: int, trace: bool = False) -> Answer:
    """Update `number`. Losses are nats a token over all ranks; `events` and `marks` where traced."""
    from miras_megatron.training.step import train_step

    relay, marks = job.model.relay, list[Any]()
    watched = trace and relay is not None
    with _watching(job.mesh.ring, marks) if watched else _nothing():
        if watched:
            relay.recorder.on = True
        busy = time.process_time()
        report = train_step(job, number)
        busy = time.process_time() - busy
    found = {
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "seconds": report.seconds,
        "cpu_seconds": busy,
        "idle": report.idle,
        "peak_mib": memory_mib("VmHWM"),
    }
    if watched:
        relay.recorder.on = False
        found |= {"events": relay.recorder.take(job.waits), "marks": marks}
    return found


def compare(job: Any) -> Answer:
    """Gradients in float64 of the job's next row in its pieces beside those of the same row in one go.

    The largest difference of any parameter's gradient, over that gradient's largest value, and of the losses.
    """
    import torch

    batch = job.feed.step(1)[0]
    model, relay = job.model.double(), job.model.relay
    found: list[tuple[Any, list[Any]]] = []
    for walks in (relay, None):
        model.relay = walks
        losses = model(batch.tokens, labels=batch.labels)
        gradients = torch.autograd.grad((losses * batch.loss_mask).sum(), list(model.parameters()), allow_unused=True)
        found.append((losses.detach(), [g for g in gradients if g is not None]))
        del losses
    model.relay = relay
    (losses, split), (same, whole) = found
    pairs = zip([losses, *split], [same, *whole], strict=True)
    differences = [float((a - b).abs().max() / b.abs().max().clamp_min(1e-300)) for a, b in pairs]
    return {"loss_difference": differences[0], "gradient_difference": max(differences[1:]), "compared": len(whole)}


def packets(job: Any, sizes: Sequence[int]) -> Answer:
    """Seconds to take in a packet of each of `sizes` bytes from the left neighbour, once it is there: medians."""
    import torch

    from miras_megatron.parallel.exchange import Key

    ring, found = job.mesh.ring, []
    for slot, size in enumerate(sizes):
        content, taken = [torch.zeros(size, dtype=torch.uint8)], []
        for piece in range(PACKETS):
            key = Key(0, piece, NO_LAYER, slot)
            ring.send("right", key, content)
            time.sleep(PACKET_ARRIVES)
            began = time.perf_counter()
            ring.receive("right", key, content)
            taken.append(time.perf_counter() - began)
        found.append(median(taken))
    ring.finish()
    ring.drain_waits()
    return {"seconds": found}


TASKS: dict[str, Callable[..., Answer]] = {"step": step, "compare": compare, "packets": packets}


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _watching(ring: Any, marks: list[Any]) -> Iterator[None]:
    """Note when packets are handed on, before, and when they have come, after; see bench_trace.Mark."""
    from miras_megatron.parallel.exchange import packed_bytes

    send, receive = ring.send, ring.receive

    def note(what: str, direction: str, key: Any, tensors: Any) -> None:
        marks.append([1e6 * time.time(), what, direction, *key, packed_bytes(tensors)])

    def noted_send(direction: str, key: Any, tensors: Any) -> None:
        note("send", direction, key, tensors)
        send(direction, key, tensors)

    def noted_receive(direction: str, key: Any, like: Any) -> Any:
        found = receive(direction, key, like)
        note("receive", direction, key, like)
        return found

    ring.send, ring.receive = noted_send, noted_receive
    try:
        yield
    finally:
        del ring.send, ring.receive


def memory_mib(what: str) -> float:
    """VmHWM, the most this process ever held, or VmRSS, what it holds now. MiB; 0 where the system does not tell."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) / 1024.0 for line in status if line.startswith(what))
    except (OSError, StopIteration):
        return 0.0
