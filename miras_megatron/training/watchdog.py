"""The watchdog: a thread on every rank that ends a step, an evaluation or a save in which nobody moves any more.

Each rank counts how long its main thread has given no sign of life (`signs`). The first that is over its limit asks
all ranks where they stand (`questions`). Where another still moves, it only waits for that one, and so do we (a
collective has a limit of its own, parallel.timeout). Where nobody moves, or somebody doesn't answer at all, the lowest
living rank writes everybody's stacks, says who hangs, and every living process ends with exit code 4.

Time in which this thread was stopped too (a job that its scheduler suspends) doesn't count.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from ..config.schema import Run
from ..parallel.lost import RankLost, as_loss
from ..parallel.mesh import ParallelMesh
from ..parallel.notices import Notices, Unreachable
from ..parallel.whereabouts import (
    describe_device_wait,
    describe_place,
    describe_stacks,
    describe_wait,
    main_thread_frame,
)
from .questions import Questions
from .roll_call import stay_for_the_others, who_is_gone
from .signs import SIGNS, alive, begin_anew
from .stop import ignore_signals
from .stuck_report import Answer, Verdict, append_alone, summary, write_report

logger = logging.getLogger(__name__)

EXIT_CODE = 4
"""the same as for a lost rank: whoever starts the job starts it again"""

GRACE = 10.0
"""seconds a rank is given to answer: it may be in a call that lets no other Python thread run"""

MOST_OF_ERROR = 400
"""characters of an error with which a rank leaves, for the others to tell"""


@contextmanager
def watched(run: Run, mesh: ParallelMesh) -> Iterator[Callable[[], None]]:
    """Inside, ranks answer each other, and one that has lost another learns who is gone.

    From a call of what is given on, a step that hangs for training.watchdog seconds ends all ranks. None of it where
    that is 0, or where the process group is somebody else's, whose process isn't ours to end.
    """
    begin_anew()
    notices = mesh.open_notices() if run.training.watchdog > 0 else None
    if notices is None:
        yield lambda: None
        return
    dog = Watchdog(run.training.watchdog, notices, mesh, Path(run.run.dir))
    dog.start()
    try:
        yield dog.watch
    except BaseException as error:
        lost = error if isinstance(error, RankLost) else as_loss(error, mesh.name)
        if lost is not None:
            raise RankLost(f"{lost}\n{dog.find_the_lost(lost)}".rstrip()) from error
        dog.stop(own_error(error, mesh.name))
        raise
    dog.stop()


def own_error(error: BaseException, name: str) -> str:
    """What to tell the others of an `error` with which a rank leaves."""
    first_line = (str(error).splitlines() or [""])[0]
    return f"{name}: {type(error).__name__}: {first_line}"[:MOST_OF_ERROR]


class Watchdog:
    """The thread of one rank.

    limit    seconds without a sign of life
    mesh     of which only the ranks' numbers, names and devices are used
    folder   run.dir, where stuck_step_N.txt goes when it is there
    """

    def __init__(self, limit: float, notices: Notices, mesh: ParallelMesh, folder: Path) -> None:
        self.limit, self.notices, self.folder = limit, notices, folder
        self.rank, self.ranks, self.device = mesh.rank, mesh.world_size, mesh.device
        self.title = f"{mesh.name}, process {os.getpid()} on {socket.gethostname()}"
        self.tick = min(max(limit / 20, 0.05), 5.0)
        self.silent, self._seen, self._last, self._watches = 0.0, -1, time.monotonic(), False
        self.questions = Questions(notices, self.rank, self.ranks, self._where, GRACE, self.tick)
        self._ask_at, self._store_is_gone = limit, False
        self._in_vain: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to answer the others."""
        with suppress(Unreachable):
            self.notices.put(f"title_{self.rank}", self.title, GRACE)
        self._thread.start()

    def watch(self) -> None:
        """Begin to watch too."""
        alive()
        self._watches = True

    def stop(self, error: str = "") -> None:
        """The main thread leaves, with an error if there is one; whoever asks later isn't to wait for this rank."""
        self._rest()
        with suppress(Unreachable):
            self.notices.put(f"left_{self.rank}", error, 1.0)
        self.notices.close()

    def find_the_lost(self, lost: RankLost) -> str:
        """The main thread has lost another rank: say so, find out who is gone, and leave, with no error of its own."""
        ignore_signals()
        logger.warning("%s; asks all ranks who is gone", str(lost).splitlines()[0])
        self._rest()
        finding = who_is_gone(self.questions)
        if self.notices.keeper == "rank 0" and self.rank == 0:
            stay_for_the_others(self.questions, finding)
        self.stop()
        return finding.text

    def _rest(self) -> None:
        self._stop.set()
        self._thread.join(2 * self.tick + 1)

    def _watch(self) -> None:
        while not self._stop.wait(self.tick):
            self._count()
            if self._store_is_gone and self.silent < self.limit:
                continue
            try:
                self._answer_questions()
                if self._watches and self.silent >= self._ask_at:
                    self._ask()
            except Unreachable as error:
                self._store_is_gone = error.__cause__ is not None
                if self._watches and self.silent >= self.limit and not self._stop.is_set():
                    self._end_alone(str(error))

    def _count(self) -> None:
        """How long the main thread has given no sign, in time that this thread had too."""
        now = time.monotonic()
        self.silent += min(now - self._last, self.tick + 2 * GRACE)  # a store that doesn't answer takes that long
        self._last = now
        if SIGNS.count != self._seen:
            self._seen, self.silent, self._ask_at = SIGNS.count, 0.0, self.limit

    def _answer_questions(self) -> None:
        """Tell where this rank stands, if somebody asked; end if somebody decided so."""
        verdict = self.questions.answer()
        if verdict is not None:
            self._end(verdict)
        if self.questions.in_vain != self._in_vain:
            self._in_vain = self.questions.in_vain
            self._ask_at = max(self._ask_at, self.silent + self.limit / 10)

    def _where(self) -> Answer:
        frame = main_thread_frame()
        leaves = self._stop.is_set()
        asks = "answers, having lost another rank" if leaves else None
        place = asks or describe_wait(frame) or describe_device_wait(frame, self.device)
        return Answer(
            self.title,
            SIGNS.place,
            SIGNS.step,
            self.silent,
            place is not None,
            place or describe_place(frame),
            describe_stacks(but=("watchdog", "notices")),
            leaves,
        )

    def _ask(self) -> None:
        """Ask all ranks where they stand, and decide, unless another does. This rank is over its limit."""
        question = self.questions.ask()
        if question is None:
            return
        answers = self.questions.gather(question, GRACE)
        moving = [answer for answer in answers.values() if answer.silent < 0.9 * self.limit]
        absent = self.questions.absent(answers)
        left = self.questions.left(absent)
        missing = [rank for rank in absent if rank not in left]
        if self._stop.is_set() or SIGNS.count != self._seen or (moving and not missing):
            self._ask_at = self.silent + self.limit / 10
            self.questions.give_up(question)
            return
        failed = [error for error in left.values() if error]
        stays = sorted(rank for rank, answer in answers.items() if not answer.leaves)
        self.questions.decide(Verdict(question, stays[0], stays, missing, failed))

    # -- the end -----------------------------------------------------------------------------------
    def _end(self, verdict: Verdict) -> NoReturn:
        """As decided: one rank tells for all, the others wait for it."""
        tells = self.rank == verdict.teller
        try:
            if tells:
                self._tell(verdict)
                tells = False
                others = [rank for rank in verdict.answered if rank != self.rank]
                self.questions.wait_for([f"ends_{rank}" for rank in others], GRACE)  # this one may keep the store
            else:
                self.questions.wait_for(["told"], 2 * GRACE)
                self.notices.put(f"ends_{self.rank}", "", GRACE)
        except Unreachable as error:
            if tells:
                self._end_alone(str(error))
        _leave()

    def _tell(self, verdict: Verdict) -> None:
        answers = self.questions.answers_to(verdict.question)
        titles = self.notices.get([f"title_{rank}" for rank in range(self.ranks)], GRACE)
        path = write_report(self.folder, self.limit, answers, verdict, titles)
        _say(summary(self.limit, answers, verdict, titles, path))
        self.notices.put("told", "", GRACE)

    def _end_alone(self, error: str) -> NoReturn:
        """Over the limit, and nobody can be asked: the store is kept by a process that hangs or is gone."""
        keeper = self.notices.keeper
        answer = self._where()
        path = append_alone(self.folder, self.rank, answer, keeper)
        _say(
            f"miras-train: no sign of life for {self.silent:.0f} s ({answer.place}); rank {self.rank} can't ask the "
            f"others: {keeper}, which keeps the store in which ranks meet, doesn't answer ({error}), so it is most "
            f"likely {keeper} that hangs, is stopped, or is gone. Rank {self.rank} "
            f"{'waits for' if answer.waits else 'is at'} {answer.where}; its stack: {path}"
        )
        _leave()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _leave() -> NoReturn:
    """End this process at once: its main thread hangs, so that nothing can be tidied up."""
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(EXIT_CODE)
