"""Ranks as processes of their own, which a test may stop, kill, or let loop for ever.

    with start_ranks(2, argv, folder, {1: Fault("sign", 40, "stop")}) as ranks:
        assert ranks.wait(60) == [4, None]

They begin as torchrun would start them, in a second, since they are forked from one process that has imported
everything. What a rank prints lies in folder/rank0.out and .err. Nobody outlives the `with`.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from unittest import mock

START_DEADLINE = 240.0
"""seconds until the imports are done, on a busy machine"""


@dataclass(frozen=True)
class Fault:
    """What befalls a rank, and when.

    at      "sign": at the `number`-th sign of life; "file": before the `number`-th change in the checkpoints' folder
    does    kill: SIGKILL; stop: SIGSTOP; loop: the main thread loops in Python for ever; fill: the disk is full from
            then on, so that no file or folder can be made there
    later   seconds between the moment and a kill, so that it falls into a write
    """

    at: Literal["sign", "file"]
    number: int
    does: Literal["kill", "stop", "loop", "fill"]
    later: float = 0.0


@dataclass
class Ranks:
    """The processes of one start of a run."""

    folder: Path
    processes: list[Any] = field(default_factory=list)

    def wait(self, deadline: float, but: int | None = None) -> list[int | None]:
        """The exit codes after all (but rank `but`) have ended, or after `deadline` seconds; None: still there."""
        end = time.monotonic() + deadline
        for process in [process for rank, process in enumerate(self.processes) if rank != but]:
            process.join(max(0.0, end - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def wait_for_moment(self, deadline: float) -> str:
        """Until the fault has come; when that was."""
        end = time.monotonic() + deadline
        while not self.moment():
            assert time.monotonic() < end, (
                f"the fault hasn't come: {[self.said(r) for r in range(len(self.processes))]}"
            )
            time.sleep(0.05)
        return self.moment()

    def said(self, rank: int, where: str = "err") -> str:
        """What a rank has printed so far."""
        return (self.folder / f"rank{rank}.{where}").read_text()

    def moment(self) -> str:
        """When the fault came; empty: it hasn't."""
        path = self.folder / "moment.txt"
        return path.read_text() if path.exists() else ""

    def moments(self, rank: int) -> dict[str, int]:
        """How many moments of each kind a rank has had, where `counted`."""
        counts: dict[str, int] = json.loads((self.folder / f"moments{rank}.json").read_text())
        return counts

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def start_ranks(
    size: int,
    argv: list[str],
    folder: Path,
    faults: Mapping[int, Fault] | None = None,
    *,
    largest_file: int | None = None,
    counted: bool = False,
) -> Ranks:
    """Start `size` ranks of `miras-train argv`.

    folder        of their output; of each start its own
    faults        rank -> what befalls it
    largest_file  bytes that a file may have (RLIMIT_FSIZE), as on a disk that is full
    counted       moments at which a fault could come are counted
    """
    folder.mkdir(parents=True)
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["helpers.ranks_imports"])
    with mock.patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(sys.path)}):  # it knows no other path by itself
        forkserver.ensure_running()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = Ranks(folder)
    for rank in range(size):
        here = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        fault = (faults or {}).get(rank)
        process = context.Process(target=_rank, args=(argv, here | there, str(folder), fault, largest_file, counted))
        process.start()
        ranks.processes.append(process)
    return ranks


def _rank(
    argv: list[str],
    environment: dict[str, str],
    folder: str,
    fault: Fault | None,
    largest_file: int | None,
    counted: bool,
) -> None:
    """A rank's life."""
    os.environ.update(environment)
    for number, end in ((1, "out"), (2, "err")):
        file = os.open(f"{folder}/rank{environment['RANK']}.{end}", os.O_WRONLY | os.O_CREAT, 0o644)
        os.dup2(file, number)
    import resource

    import torch

    from miras_megatron.training.main import main
    from miras_megatron.training.signs import SIGNS

    torch.set_num_threads(1)
    seen = [0]
    if fault is not None or counted:
        _await(fault or Fault("file", 0, "kill"), f"{folder}/moment.txt", seen)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
    code = main(argv)
    if counted:
        moments = {"sign": SIGNS.count, "file": seen[0]}
        Path(f"{folder}/moments{environment['RANK']}.json").write_text(json.dumps(moments))
    sys.exit(code)


def _await(fault: Fault, moment: str, seen: list[int]) -> None:
    """Let the fault come at its time; changes of the checkpoints' folder are counted in `seen`."""
    from miras_megatron.training import signs

    if fault.at == "file":

        def hook(event: str, args: tuple[Any, ...]) -> None:
            if what := change_of_checkpoints(event, args):
                seen[0] += 1
                if seen[0] == fault.number:
                    befall(fault, f"before {what}", moment)
                if fault.does == "fill" and seen[0] >= fault.number and event in ("open", "os.mkdir"):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), what)

        sys.addaudithook(hook)
        return

    class Counted(signs.Signs):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "count" and value == fault.number:
                befall(fault, f"{self.place}, sign of life {value}", moment)

    signs.SIGNS.__class__ = Counted


CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")


def change_of_checkpoints(event: str, args: tuple[Any, ...]) -> str:
    """What an audit event of Python changes in a checkpoints' folder, in words; empty: nothing."""
    paths = [os.fsdecode(x) for x in args[:2] if isinstance(x, str | bytes | os.PathLike)]
    if event == "open":
        writes = isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        paths = paths[:1] if writes else []
    elif event not in CHANGES:
        return ""
    inside = [path.split("/checkpoints/")[1] for path in paths if "/checkpoints/" in path]
    return f"{event.rpartition('.')[2]} {' to '.join(inside)}" if inside else ""


def befall(fault: Fault, when: str, moment: str) -> None:
    """The fault itself; `when` is written down first."""
    with open(f"{moment}.part", "w", encoding="utf-8") as file:
        file.write(when + (f", {1000 * fault.later:.0f} ms later" if fault.later else ""))
    os.replace(f"{moment}.part", moment)
    if fault.does == "kill" and fault.later:
        threading.Timer(fault.later, os.kill, (os.getpid(), signal.SIGKILL)).start()
    elif fault.does == "loop":
        loop_for_ever()
    elif fault.does != "fill":
        os.kill(os.getpid(), signal.SIGKILL if fault.does == "kill" else signal.SIGSTOP)


def loop_for_ever() -> None:
    """A fault of a user's, or of ours."""
    turns = 0
    while True:
        turns += 1
