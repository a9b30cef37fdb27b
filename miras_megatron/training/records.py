"""Files of records, an object a line: how a line is written, and what of them a run that goes on keeps and counts."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

RECORDS = ("metrics.jsonl", "validation.jsonl", "gradients.jsonl")
"""Files with a line a step; those after a step that the run goes back to are dropped."""

EVENTS = "events.jsonl"
"""Bad steps, also those that were rolled back; nothing is dropped."""


def line_of(record: dict[str, Any]) -> str:
    """A record as one line of a file."""
    return json.dumps({k: _plain(v) for k, v in record.items()}) + "\n"


def _plain(value: Any) -> Any:
    """JSON has no NaN: a number that is none is written as its name."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value


def count_events(path: Path) -> Counter[str]:
    """Action -> how often the run took it, however often it was cut; what is no record doesn't count.

    A step of one number over other rows is another step: a roll back lies between. Older records don't tell the rows.
    """
    seen: set[tuple[int, int | None, str]] = set()
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        try:
            record = json.loads(line)
            rows = record.get("rows")
            seen.add((int(record["step"]), rows if rows is None else int(rows), str(record["action"])))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return Counter(action for *_, action in seen)


def drop_after(path: Path, step: int) -> None:
    """Keep the records of `path` up to `step`; lines that are no record go too. Whole or not at all."""
    if not path.exists():
        return
    kept = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if _step_of(line) <= step]
    part = path.with_suffix(".part")
    part.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    os.replace(part, path)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf
