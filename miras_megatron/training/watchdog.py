"""The watchdog: a thread on every rank that ends a step, an evaluation or a save in which nobody moves any more.

Each rank counts how long its main thread has given no sign of life (`signs`). The first that is over its limit asks
all ranks where they stand. Where another still moves, it only waits for that one, and so do we (a collective has a
limit of its own, parallel.timeout). Where nobody moves, or somebody doesn't answer at all, the lowest living rank
writes everybody's stacks, says who hangs, and every living process ends with exit code 4.

Time in which this thread was stopped too (a job that its scheduler suspends) doesn't count.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from ..config.schema import Run
from ..parallel.mesh import ParallelMesh
from ..parallel.notices import Notices, Unreachable
from ..parallel.whereabouts import describe_place, describe_stacks, describe_wait, main_thread_frame
from .signs import SIGNS, begin_anew
from .stuck_report import Answer, Verdict, append_alone, summary, write_report

EXIT_CODE = 4
"""the same as for a lost rank: whoever starts the job starts it again"""

GRACE = 10.0
"""seconds a rank is given to answer: it may be in a call that lets no other Python thread run"""


@contextmanager
def watched(run: Run, mesh: ParallelMesh) -> Iterator[None]:
    """Inside, the step that hangs for training.watchdog seconds ends all ranks; nothing where that is 0.

    Nothing either where the process group is somebody else's, whose process isn't ours to end.
    """
    begin_anew()
    notices = mesh.open_notices() if run.training.watchdog > 0 else None
    if notices is None:
        yield
        return
    dog = Watchdog(run.training.watchdog, notices, mesh.rank, mesh.world_size, mesh.name, Path(run.run.dir))
    dog.start()
    try:
        yield
    finally:
        dog.stop()


class Watchdog:
    """The thread of one rank.

    limit    seconds without a sign of life
    folder   run.dir, where stuck_step_N.txt goes when it is there
    """

    def __init__(self, limit: float, notices: Notices, rank: int, ranks: int, name: str, folder: Path) -> None:
        self.limit, self.notices, self.rank, self.ranks, self.folder = limit, notices, rank, ranks, folder
        self.title = f"{name}, process {os.getpid()} on {socket.gethostname()}"
        self.tick = min(max(limit / 20, 0.05), 5.0)
        self.silent, self._seen, self._last, self._answered = 0.0, -1, time.monotonic(), 0
        self._ask_at, self._store_is_gone = limit, False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        with suppress(Unreachable):
            self.notices.put(f"title_{self.rank}", self.title, GRACE)
        self._thread.start()

    def stop(self) -> None:
        """The main thread leaves; whoever asks later isn't to wait for this rank."""
        self._stop.set()
        self._thread.join(2 * self.tick + 1)
        with suppress(Unreachable):
            self.notices.put(f"left_{self.rank}", "", 1.0)
        self.notices.close()

    def _watch(self) -> None:
        while not self._stop.wait(self.tick):
            self._count()
            if self._store_is_gone and self.silent < self.limit:
                continue
            try:
                self._answer_questions()
                if self.silent >= self._ask_at:
                    self._ask()
            except Unreachable as error:
                self._store_is_gone = error.__cause__ is not None
                if self.silent >= self.limit and not self._stop.is_set():
                    self._end_alone(str(error))

    def _count(self) -> None:
        """How long the main thread has given no sign, in time that this thread had too."""
        now = time.monotonic()
        self.silent += min(now - self._last, self.tick + GRACE)
        self._last = now
        if SIGNS.count != self._seen:
            self._seen, self.silent, self._ask_at = SIGNS.count, 0.0, self.limit

    def _answer_questions(self) -> None:
        """Tell where this rank stands, if somebody asked; end if somebody decided so."""
        self._answer(self.notices.count("questions", 0, GRACE))
        (decided,) = self.notices.get(["verdict"], GRACE)
        if decided is not None:
            self._end(Verdict(**json.loads(decided)))

    def _answer(self, last: int) -> None:
        """Answer every question up to the `last`: several ranks may ask at once."""
        text = self._where().to_json() if last > self._answered else ""
        while self._answered < last:
            self._answered += 1
            self.notices.put(f"answer_{self._answered}_{self.rank}", text, GRACE)

    def _where(self) -> Answer:
        frame = main_thread_frame()
        place = describe_wait(frame)
        return Answer(
            self.title,
            SIGNS.place,
            SIGNS.step,
            self.silent,
            place is not None,
            place or describe_place(frame),
            describe_stacks(but=("watchdog", "notices")),
        )

    def _ask(self) -> None:
        """Ask all ranks where they stand, and decide. This rank is over its limit."""
        question = self.notices.count("questions", 1, GRACE)
        self._answer(question)
        answers = self._gather(question)
        moving = [answer for answer in answers.values() if answer.silent < 0.9 * self.limit]
        missing = [rank for rank in range(self.ranks) if rank not in answers and not self._has_left(rank)]
        if self._stop.is_set() or SIGNS.count != self._seen or (moving and not missing):
            self._ask_at = self.silent + self.limit / 10
            return
        self.notices.put_first("verdict", json.dumps({"question": question, "missing": missing}), GRACE)

    def _gather(self, question: int) -> dict[int, Answer]:
        """The answers to a question, of the ranks that give one in time."""
        answers: dict[int, Answer] = {}
        give_up = time.monotonic() + GRACE + self.tick
        while len(answers) < self.ranks and time.monotonic() < give_up:
            open_ranks = [rank for rank in range(self.ranks) if rank not in answers]
            texts = self.notices.get([f"answer_{question}_{rank}" for rank in open_ranks], GRACE)
            answers |= {
                r: Answer.from_json(text) for r, text in zip(open_ranks, texts, strict=True) if text is not None
            }
            if all(self._has_left(rank) for rank in range(self.ranks) if rank not in answers):
                break
            time.sleep(min(self.tick, 0.2))
            self._answer_questions()  # of another that asks at the same time
        return answers

    def _has_left(self, rank: int) -> bool:
        return self.notices.get([f"left_{rank}"], GRACE)[0] is not None

    # -- the end -----------------------------------------------------------------------------------
    def _end(self, verdict: Verdict) -> NoReturn:
        """As decided: the lowest rank that answered tells for all, the others wait for it."""
        try:
            names = [f"answer_{verdict.question}_{rank}" for rank in range(self.ranks)]
            texts = self.notices.get(names, GRACE)
            answers = {rank: Answer.from_json(text) for rank, text in enumerate(texts) if text is not None}
            if self.rank == min(answers, default=self.rank):
                titles = self.notices.get([f"title_{rank}" for rank in range(self.ranks)], GRACE)
                path = write_report(self.folder, self.limit, answers, verdict, titles)
                _say(summary(self.limit, answers, verdict, titles, path))
                self.notices.put("told", "", GRACE)
                self._wait_for(
                    [f"ends_{rank}" for rank in answers if rank != self.rank]
                )  # this may be the store's keeper
            else:
                self._wait_for(["told"])
                self.notices.put(f"ends_{self.rank}", "", GRACE)
        except Unreachable:
            pass  # whoever kept the store has told, and is gone
        _leave()

    def _wait_for(self, names: list[str]) -> None:
        """Until all `names` are set, or for GRACE seconds."""
        give_up = time.monotonic() + GRACE
        while None in self.notices.get(names, GRACE) and time.monotonic() < give_up:
            time.sleep(min(self.tick, 0.2))

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
