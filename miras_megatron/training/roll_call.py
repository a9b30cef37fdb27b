"""Who is gone? Asked by the ranks that have lost another in a collective, whose error names nobody.

A collective fails on whoever is its member, often through a neighbour that failed before. The watchdogs of all living
ranks answer, though their main threads work or wait: who doesn't is gone. One rank asks; all who lost one tell its
finding.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

from ..parallel.notices import Unreachable
from .questions import Questions
from .stuck_report import Answer

PATIENCE = 5.0
"""seconds a rank is given to answer: torchrun and srun give the survivors some thirty before they kill them"""

LAST = 2.0
"""seconds the rank that keeps the store stays for those that read in it"""

MOST = 8
"""ranks that a finding names"""

NOBODY = "every rank answers, or has left: a connection broke, or a rank was too slow"
"""the finding where no rank is gone"""


def who_is_gone(questions: Questions) -> str:
    """Call the roll, or wait for the finding of the rank that does. A line for users; "" where none came in time.

    Called by the main thread, when the watchdog's own has stopped: it answers in its place.
    """
    give_up = time.monotonic() + 3 * PATIENCE
    try:
        while questions.answer() is None and time.monotonic() < give_up:
            (finding,) = questions.notices.get(["gone"], PATIENCE)
            if finding is not None:
                return finding
            question = questions.ask()
            if question is not None:
                _call_the_roll(questions, question)
            time.sleep(questions.pause)
    except Unreachable:
        return (
            f"{questions.notices.keeper}, which keeps the store in which ranks meet, gives no answer: dead, or gone too"
        )
    return ""


def stay_for_the_others(questions: Questions) -> None:
    """Of the rank with which the store goes: let those who ask there read the finding first."""
    with suppress(Unreachable):
        others = [f"left_{rank}" for rank in range(questions.ranks) if rank != questions.rank]
        questions.wait_for(others, LAST)


def _call_the_roll(questions: Questions, question: str) -> None:
    answers = questions.gather(question, PATIENCE)
    absent = questions.absent(answers)
    left = questions.left(absent)
    missing = [rank for rank in absent if rank not in left]
    titles = questions.notices.get([f"title_{rank}" for rank in missing], PATIENCE)
    names = [title or f"rank {rank}" for rank, title in zip(missing, titles, strict=True)]
    questions.notices.swap("gone", "", _finding(names, answers), PATIENCE)
    questions.give_up(question)


def _finding(missing: list[str], answers: Mapping[int, Answer]) -> str:
    """Those that give no answer; where all do, those that work on while the others waited for them."""
    if missing:
        return f"no answer from {_some(missing)}: dead, stopped, or the machine is gone"
    busy = [
        f"{answer.title} is at {answer.where} ({answer.place}, no sign of life for {answer.silent:.0f} s)"
        for _, answer in sorted(answers.items())
        if not answer.waits
    ]
    return NOBODY + (f"; at work: {_some(busy)}" if busy else "")


def _some(names: list[str]) -> str:
    return ", ".join(names[:MOST]) + (f" and {len(names) - MOST} more" if len(names) > MOST else "")
