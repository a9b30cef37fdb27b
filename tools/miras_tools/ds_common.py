"""What stands in a common.pt that came from elsewhere, looked at before a run is made of it."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from miras_megatron.training.checkpoint import COMMON
from miras_megatron.training.plain_files import read_plain

MOST = 2**53
"""of steps, tokens and updates: up to here a float64 counts them one by one"""


def read_common(folder: Path) -> dict[str, Any]:
    """`common.pt` of `folder`: names of checkpoint.COMMON -> values, with which a run can go on.

    Raises ValueError naming the file and every value that is missing or can't be.
    """
    path = folder / "common.pt"
    common = read_plain(path, COMMON)
    problems = list(_problems(common))
    if problems:
        way_out = "take the file that to-universal wrote, or name a run of the same model with --like"
        raise ValueError(f"{path}: {'; '.join(problems)}; {way_out}")
    return common


def is_count(value: object) -> bool:
    """Whether it is a whole number of steps, tokens or updates."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST


def _problems(common: dict[str, Any]) -> Iterator[str]:
    for name, (fits, rule) in RULES.items():
        if name not in common:
            yield f"{name} is missing"
        elif not fits(common[name]):
            yield f"{name} = {reprlib.repr(common[name])}: must be {rule}"
    if "recent" in common and not _is_recent(common["recent"]):  # older checkpoints have none
        yield f"recent = {reprlib.repr(common['recent'])}: must be names and lists of numbers"


def _is_position(value: object) -> bool:
    """Whether it is of Feed.position(), or empty as what comes from other formats has it."""
    if not isinstance(value, dict) or (value and "usual" not in value):
        return False
    return all(
        isinstance(part, dict) and is_count(part.get("samples")) and "fingerprint" in part for part in value.values()
    )


def _is_recent(value: object) -> bool:
    lists = value.values() if isinstance(value, dict) else [None]
    return all(isinstance(each, list) and all(isinstance(x, int | float) for x in each) for each in lists)


COUNT = (is_count, f"a whole number from 0 to {MOST}")

RULES: dict[str, tuple[Callable[[object], bool], str]] = {
    "step": COUNT,
    "tokens": COUNT,
    "updates": COUNT,
    "tokenizer": (lambda value: isinstance(value, str), "the digest of a tokenizer, a text"),
    "data": (_is_position, "a position in the data: usual, with samples and fingerprint"),
}
"""Name -> whether a value fits, and what it must be."""
