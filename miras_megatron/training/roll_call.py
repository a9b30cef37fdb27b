"""Who is gone? Asked by the ranks that have lost another in a collective, whose error names nobody.

A collective fails on whoever is its member, often through a neighbour that failed before. The watchdogs of all living
ranks answer, though their main threads work or wait: who doesn't is gone. One rank asks; all who lost one tell its
finding.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from ..parallel.notices import Unreachable
from .questions import Questions
from .stuck_report import Answer

PATIENCE = 5.0
"""seconds a rank is given to answer: torchrun kills after thirty, whoever doesn't end when it is asked to"""

LAST = 10.0
"""seconds the rank that keeps the store stays at most for those that read in it"""

MOST = 8
"""ranks that a finding names"""

NOBODY = "every rank answers: a connection broke, or a rank was too slow"
"""the finding where no rank is gone"""


@dataclass(frozen=True)
class Finding:
    """A line for users, and the ranks that gave no answer."""

    text: str = ""
    missing: list[int] = field(default_factory=list)


def who_is_gone(questions: Questions) -> Finding:
    """Call the roll, or wait for the finding of the rank that does; an empty one where none came in time.

    Called by the main thread, when the watchdog's own has stopped: it answers in its place.
    """
    questions.patience = PATIENCE
    give_up = time.monotonic() + 4 * PATIENCE
    try:
        while questions.answer() is None:
            (found,) = questions.notices.get(["gone"], PATIENCE)
            if found is not None:
                return Finding(**json.loads(found))
            if time.monotonic() > give_up:
                break
            question = questions.ask(ticks=2)
            if question is not None:
                _call_the_roll(questions, question)
            time.sleep(questions.pause)
    except Unreachable:
        keeper = questions.notices.keeper
        return Finding(
            f"{keeper}, which keeps the store where ranks meet, gives no answer: dead, stopped, or it left before, and "
            f"said why"
        )
    return Finding()


def stay_for_the_others(questions: Questions, finding: Finding) -> None:
    """Of the rank with which the store goes: let those that answer read the finding first."""
    others = [rank for rank in range(questions.ranks) if rank not in (questions.rank, *finding.missing)]
    with suppress(Unreachable):
        questions.wait_for([f"left_{rank}" for rank in others], LAST)


def _call_the_roll(questions: Questions, question: str) -> None:
    answers = questions.gather(question, PATIENCE)
    absent = questions.absent(answers)
    left = questions.left(absent)
    missing = [rank for rank in absent if rank not in left]
    titles = questions.notices.get([f"title_{rank}" for rank in missing], PATIENCE)
    names = [title or f"rank {rank}" for rank, title in zip(missing, titles, strict=True)]
    finding = Finding(_in_words(names, [error for error in left.values() if error], answers), missing)
    questions.notices.swap("gone", "", json.dumps(asdict(finding)), PATIENCE)
    questions.give_up(question)


def _in_words(missing: Sequence[str], failed: Sequence[str], answers: Mapping[int, Answer]) -> str:
    """Those that give no answer; else those that failed; else those that work on, for whom the others had to wait."""
    if missing:
        return f"no answer from {_some(missing)}: dead, stopped, or the machine is gone"
    if failed:
        return f"left with an error: {_some(failed)}"
    busy = [
        f"{answer.title} is at {answer.where} ({answer.place}, no sign of life for {answer.silent:.0f} s)"
        for _, answer in sorted(answers.items())
        if not answer.waits
    ]
    return NOBODY + (f"; at work: {_some(busy)}" if busy else "")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST]) + (f" and {len(names) - MOST} more" if len(names) > MOST else "")
