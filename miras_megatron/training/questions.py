"""Questions among the watchdogs of all ranks: who stands where? One is open at a time, however many have one.

A question is "3.17": the third, of rank 17. Whoever asks gathers the answers and decides for all; an asker that dies
is given up after a while, and the next may ask.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import asdict

from ..parallel.notices import Notices
from .stuck_report import Answer, Verdict

PAUSE = 0.2
"""seconds between two looks at what has come, at most"""


class Questions:
    """One rank's part in them. Every method raises Unreachable where the store doesn't answer.

    where     tells where this rank's main thread stands
    patience  seconds a rank is given to answer, and the store too
    tick      seconds between two calls of `answer`
    """

    def __init__(
        self, notices: Notices, rank: int, ranks: int, where: Callable[[], Answer], patience: float, tick: float
    ) -> None:
        self.notices, self.rank, self.ranks, self.where = notices, rank, ranks, where
        self.patience, self.tick, self.pause = patience, tick, min(tick, PAUSE)
        self._last, self._seen = "", 0.0
        self.in_vain: str | None = None
        """the last question after which nothing was decided, since somebody moved"""

    def answer(self) -> Verdict | None:
        """Answer the question that is open, if there is a new one. What was decided, if somebody did."""
        asked, decided, self.in_vain = self.notices.get(["question", "verdict", "in_vain"], self.patience)
        if asked is not None and asked != self._last:
            self._answer(asked)
        return None if decided is None else Verdict(**json.loads(decided))

    def _answer(self, question: str) -> None:
        self._last, self._seen = question, time.monotonic()
        self.notices.put(f"answer_{question}_{self.rank}", self.where().to_json(), self.patience)

    def ask(self, ticks: int = 3) -> str | None:
        """Open a question; None where another rank's is open, who decides for all.

        ticks  beyond the patience that its asker is given
        """
        number, _, _ = self._last.partition(".")
        question = f"{int(number or 0) + 1}.{self.rank}"
        is_late = time.monotonic() >= self._seen + self.patience + ticks * self.tick
        is_open = self._last and self._last != self.in_vain and not is_late
        if is_open or not self.notices.swap("question", self._last, question, self.patience):
            return None
        self._answer(question)
        return question

    def gather(self, question: str, patience: float) -> dict[int, Answer]:
        """Rank -> its answer, as soon as all that are still here have given one, or `patience` seconds have passed."""
        answers: dict[int, Answer] = {}
        give_up = time.monotonic() + patience + self.tick
        while time.monotonic() < give_up:
            answers |= self._read(question, self.absent(answers))
            absent = self.absent(answers)
            if not absent or len(self.left(absent)) == len(absent):
                break
            time.sleep(self.pause)
            if self.answer() is not None:  # another's, who took this one for given up
                break
        return answers

    def give_up(self, question: str) -> None:
        """Somebody moves: nothing is decided, and what was answered is forgotten."""
        self.notices.put("in_vain", question, self.patience)
        self.notices.drop([f"answer_{question}_{rank}" for rank in range(self.ranks)], self.patience)

    def answers_to(self, question: str) -> dict[int, Answer]:
        """Rank -> its answer, as far as there is one."""
        return self._read(question, range(self.ranks))

    def _read(self, question: str, ranks: Collection[int]) -> dict[int, Answer]:
        texts = self.notices.get([f"answer_{question}_{rank}" for rank in ranks], self.patience)
        return {rank: Answer.from_json(text) for rank, text in zip(ranks, texts, strict=True) if text is not None}

    def absent(self, answers: Collection[int]) -> list[int]:
        """Ranks without an answer."""
        return [rank for rank in range(self.ranks) if rank not in answers]

    def left(self, ranks: Collection[int]) -> dict[int, str]:
        """Those of `ranks` that have left the run, and with which error ("": with none)."""
        texts = self.notices.get([f"left_{rank}" for rank in ranks], self.patience)
        return {rank: text for rank, text in zip(ranks, texts, strict=True) if text is not None}

    def decide(self, verdict: Verdict) -> None:
        """Let all ranks end, unless somebody did."""
        self.notices.swap("verdict", "", json.dumps(asdict(verdict)), self.patience)

    def wait_for(self, names: Collection[str], seconds: float) -> None:
        """Until all `names` are set, or so many seconds have passed."""
        give_up = time.monotonic() + seconds
        while None in self.notices.get(list(names), self.patience) and time.monotonic() < give_up:
            time.sleep(self.pause)
