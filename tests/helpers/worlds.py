"""Run a test's function on n gloo ranks of this CPU, with a deadline.

    def case(x):                      # runs on every rank; torch.distributed is there already
        return dist.get_rank() + x

    assert run_world(2, case, 5) == [5, 6]

The function must be at the top level of its file; arguments and results must be picklable. Ranks are kept
between calls, since importing torch and megatron-core costs seconds; a rank that fails, or a deadline
missed, ends all ranks of that world, and the next call starts new ones. Nobody outlives the test session.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.util
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

START_DEADLINE = 240.0
"""seconds for the imports of all ranks, on a busy machine"""

MOST_THREADS = 200
"""of a rank that is kept; DeepSpeed's stage 3 holds every model it has seen, with its process groups, for ever"""


def run_world(
    size: int, function: Callable[..., Any], *args: Any, deadline: float = 180.0, backend: str = "gloo"
) -> list[Any]:
    """The results of `function(*args)` on ranks 0..size-1, in that order; with backend nccl on a GPU each.

    Raises RuntimeError with the traceback of every rank that failed, TimeoutError that names the ranks
    still running after `deadline` seconds.
    """
    world = _WORLDS.get((size, backend))
    if world is None:
        world = _WORLDS[size, backend] = World(size, backend)
    try:
        results = world.run(function, args, deadline)
    except BaseException:
        _WORLDS.pop((size, backend)).close(patience=0.0)
        raise
    if world.most_threads() > MOST_THREADS:
        _WORLDS.pop((size, backend)).close()
    return results


class World:
    """`size` processes with a group of `backend`, waiting for functions."""

    def __init__(self, size: int, backend: str = "gloo") -> None:
        context = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory(prefix="world")
        self.ranks: list[Any] = []
        self.pipes: list[Connection] = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(there, rank, size, self.folder.name, sys.path, backend), daemon=False
            )
            process.start()
            there.close()
            self.ranks.append(process)
            self.pipes.append(here)
        self._gather(START_DEADLINE, "start")

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], deadline: float) -> list[Any]:
        """See run_world."""
        path = Path(sys.modules[function.__module__].__file__ or "").resolve()
        for pipe in self.pipes:
            pipe.send((str(path), function.__qualname__, args))
        return self._gather(deadline, function.__qualname__)

    def _gather(self, deadline: float, what: str) -> list[Any]:
        end, answers = time.monotonic() + deadline, dict[int, tuple[bool, Any]]()
        while len(answers) < len(self.pipes):
            open_pipes = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            failed = any(not good for good, _ in answers.values())
            # After a failure the others get a moment: their own tracebacks may be the cause.
            ready = wait(open_pipes, timeout=max(0.0, min(end - time.monotonic(), 2.0 if failed else deadline)))
            if not ready:
                break
            for pipe in ready:
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    answers[rank] = (False, f"died with exit code {self._exit_code(rank)}")
        bad = [f"rank {rank}: {answer}" for rank, (good, answer) in sorted(answers.items()) if not good]
        if bad:
            raise RuntimeError(f"{what} failed on {len(bad)} of {len(self.pipes)} ranks\n" + "\n".join(bad))
        late = [str(rank) for rank in range(len(self.pipes)) if rank not in answers]
        if late:
            raise TimeoutError(f"{what}: ranks {', '.join(late)} were still running after {deadline:.0f} s")
        return [answers[rank][1] for rank in range(len(self.pipes))]

    def most_threads(self) -> int:
        """Of any rank."""
        return max(count_threads(process.pid) for process in self.ranks)

    def _exit_code(self, rank: int) -> int | None:
        self.ranks[rank].join(5)
        return self.ranks[rank].exitcode

    def close(self, patience: float = 20.0) -> None:
        """End every rank and all that it started (core's checkpoints start a process): by force after `patience` s."""
        for pipe in self.pipes:
            pipe.close()
        end = time.monotonic() + patience
        for process in self.ranks:
            process.join(max(0.0, end - time.monotonic()))
        for process in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
        self.folder.cleanup()


_WORLDS: dict[tuple[int, str], World] = {}


def drop_old_groups(most_threads: int = 20) -> None:
    """Collect models that only their own cycles use: they keep process groups, each with a thread of gloo's that wakes
    a hundred times a second. Thousands of them take more of two cores than all tests.

    What imports leave stays for ever, and no later collection looks at it again: that takes seconds.
    """
    global _modules
    if 0 < count_threads() <= most_threads:
        return
    gc.collect()
    if len(sys.modules) > _modules and count_threads() <= most_threads:  # a group that is still there may go later
        gc.freeze()
        _modules = len(sys.modules)


def count_threads(process: int | str = "self") -> int:
    """Of a process; 0 where the system doesn't tell."""
    tasks = Path(f"/proc/{process}/task")
    return len(os.listdir(tasks)) if tasks.exists() else 0


_modules = 0
"""imported when `drop_old_groups` last froze what was there"""


def living_worlds() -> list[tuple[int, str]]:
    """(ranks, backend) of the worlds that wait for functions."""
    return list(_WORLDS)


@atexit.register
def close_worlds(above: int = 0) -> None:
    """End all ranks of all worlds of more than `above` ranks: each rank holds the libraries' memory."""
    for key in [key for key in _WORLDS if key[0] > above]:
        _WORLDS.pop(key).close()


def _serve(pipe: Connection, rank: int, size: int, folder: str, path: list[str], backend: str) -> None:
    """A rank's life: join the group, then answer calls until the pipe closes."""
    os.setpgrp()
    sys.path[:] = path
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import datetime

    import torch
    import torch.distributed as dist

    from miras_megatron.memory.fused_lanes import KERNELS

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=120))
    pipe.send((True, None))
    while True:
        try:
            file, name, args = pipe.recv()
        except EOFError:
            break
        try:
            answer = (True, _load(file, name)(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        KERNELS.clear()
        drop_old_groups()
        pipe.send(answer)
    dist.destroy_process_group()


def _load(file: str, name: str) -> Callable[..., Any]:
    """The function `name` of the test file `file`, which no import path leads to (but to the helpers one does)."""
    if Path(file).parent == Path(__file__).resolve().parent:
        helper: Callable[..., Any] = getattr(importlib.import_module(f"helpers.{Path(file).stem}"), name)
        return helper
    module_name = "world_" + "_".join(Path(file).with_suffix("").parts[-3:])
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part)
    return function  # type: ignore[no-any-return]
