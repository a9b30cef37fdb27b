"""What is told of a step that hangs: RUN/stuck_step_N.txt with every rank's stack, and a summary of a few lines."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..parallel.whereabouts import ON_GPU
from .atomic_write import write_atomically

MOST_GROUPS = 8
"""places of ranks that the summary tells; the file has all"""


@dataclass(frozen=True)
class Answer:
    """Where one rank stands.

    title   its name, process and machine
    place   as its signs of life say: "step 12"
    silent  seconds since its last sign of life
    waits   whether it waits for other ranks; `where` says for what then, else the line it is at
    stacks  of all its threads
    leaves  whether it has lost another rank, and is about to end by itself
    """

    title: str
    place: str
    step: int
    silent: float
    waits: bool
    where: str
    stacks: str
    leaves: bool = False

    def to_json(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Answer:
        """From the store."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Verdict:
    """Which question's answers led to the end, who tells of it, and who isn't among those that answered.

    teller   the lowest rank that answered
    missing  ranks that gave no answer
    failed   "rank 3: ValueError: ..." of those that have left the run with an error of their own
    """

    question: str
    teller: int
    answered: list[int]
    missing: list[int]
    failed: list[str]


Titles = Sequence[str | None]
"""Rank -> its name, process and machine; None: it never told."""


def summary(limit: float, answers: Mapping[int, Answer], verdict: Verdict, titles: Titles, path: str) -> str:
    """Who hangs, where the others wait, where the stacks lie."""
    place = next((answers[rank].place for rank in sorted(answers)), "starting")
    lines = [f"miras-train: no sign of life for {limit:g} s ({place}); {_culprits(answers, verdict)}"]
    lines += [f"  {titles[rank] or f'rank {rank}'}: gives no answer" for rank in verdict.missing]
    lines += [f"  left with an error: {failed}" for failed in verdict.failed[:MOST_GROUPS]]
    groups: dict[tuple[bool, str], list[int]] = {}
    for rank, answer in sorted(answers.items()):
        groups.setdefault((answer.waits, answer.where), []).append(rank)
    for (waits, where), ranks in list(groups.items())[:MOST_GROUPS]:
        name = answers[ranks[0]].title if len(ranks) == 1 else f"ranks {_listed(ranks)}"
        lines.append(f"  {name}: {'waits for ' if waits else 'is at '}{where}")
    if len(groups) > MOST_GROUPS:
        lines.append(f"  and {len(groups) - MOST_GROUPS} more places")
    return "\n".join([*lines, f"  stacks: {path}", "every rank ends with exit code 4; start the run again to go on"])


def _culprits(answers: Mapping[int, Answer], verdict: Verdict) -> str:
    """Who is to blame, in words."""
    if verdict.missing:
        word = "rank" if len(verdict.missing) == 1 else "ranks"
        return f"{word} {_listed(verdict.missing)} gave no answer: stopped, dead, or the machine is gone"
    if verdict.failed:
        return f"the others wait for a rank that has left with an error: {verdict.failed[0]}"
    busy = [rank for rank, answer in sorted(answers.items()) if not answer.waits]
    if len(answers) == 1:
        return f"rank {min(answers)} hangs"
    if busy:
        return f"rank{'s' * (len(busy) > 1)} {_listed(busy)} hang{'s' * (len(busy) == 1)} outside of any collective"
    if all(answer.where.startswith(ON_GPU) for answer in answers.values()):
        return "every rank's GPU is busy: with a collective, or a kernel, that doesn't end"
    return "all ranks wait for each other: in collectives that don't fit together, or the network is gone"


def write_report(folder: Path, limit: float, answers: Mapping[int, Answer], verdict: Verdict, titles: Titles) -> str:
    """Write RUN/stuck_step_N.txt and return its path; the text itself where there is no folder, or no room in it."""
    step = max((answer.step for answer in answers.values()), default=0)
    parts = [f"No sign of life for {limit:g} s. {_now()}\n{_culprits(answers, verdict)}\n"]
    parts += [f"{'=' * 80}\n{titles[rank] or f'rank {rank}'}: gave no answer\n" for rank in verdict.missing]
    parts += [f"{'=' * 80}\n{failed}: left with it\n" for failed in verdict.failed]
    parts += [_section(answer) for _, answer in sorted(answers.items())]
    path = folder / f"stuck_step_{step}.txt"
    try:
        if not folder.is_dir():
            raise FileNotFoundError(2, "run.dir isn't there yet")
        write_atomically(path, "".join(parts))
    except OSError as error:
        return f"in no file ({error.strerror or error}):\n{''.join(parts)}"
    return str(path)


def append_alone(folder: Path, rank: int, answer: Answer, keeper: str) -> str:
    """Add this rank's stack to RUN/stuck_step_N.txt, which no rank can write for all; as `write_report`."""
    text = f"Rank {rank} could not reach {keeper}, which keeps the store. {_now()}\n{_section(answer)}"
    path = folder / f"stuck_step_{answer.step}.txt"
    try:
        if not folder.is_dir():
            raise FileNotFoundError(2, "run.dir isn't there yet")
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)  # one write: sections of ranks that append at once don't mix
    except OSError as error:
        return f"in no file ({error.strerror or error}):\n{text}"
    return str(path)


def _section(answer: Answer) -> str:
    doing = f"waits for {answer.where}" if answer.waits else f"is at {answer.where}"
    head = f"{answer.title}\n{answer.place}, no sign of life for {answer.silent:.1f} s; {doing}\n"
    return f"{'=' * 80}\n{head}{'-' * 80}\n{answer.stacks}\n"


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z")


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
