"""Reading two runs to compare: records by step, and, from the saved configurations, what kind of comparison it is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miras_megatron.config.errors import ConfigError
from miras_megatron.config.load import load_file
from miras_megatron.config.schema import Run, flatten

from .compare_verdict import LOSS, NORM, Kind

LAYOUT = (
    "parallel",
    "training.micro_batch",
    "training.recompute",
    "memory.checkpoint_every",
    "optimizer.engine",
    "optimizer.zero",
    "optimizer.offload",
    "optimizer.distributed",
)
"""Fields, or whole sections, that change only the order in which numbers are added."""
PRECISION = "training.precision"
WITHOUT_EFFECT = (
    "run",
    "checkpoint",
    "logging",
    "evaluate",
    "data.workers",
    "data.cache",
    "training.on_nan",
    "training.watchdog",
    "parallel.timeout",
)
"""Fields, or whole sections, that change no number of a step."""

Records = dict[int, dict[str, Any]]


@dataclass(frozen=True)
class Recorded:
    """What a run left behind.

    name     as the user gave it
    steps    step -> its record; `gradients` in it where they were recorded
    run      the saved configuration; None: there is none beside the file
    """

    name: str
    steps: Records
    run: Run | None


@dataclass(frozen=True)
class Inference:
    """What two configurations say about a comparison."""

    kind: Kind
    layout: dict[str, tuple[Any, Any]]
    """fields of layout or precision that differ, with both values"""
    training: dict[str, tuple[Any, Any]]
    """other fields that differ: then it isn't the same training"""


def read_run(name: str) -> Recorded:
    """A run folder, or a metrics file with or without its folder. Raises ValueError naming the file and the way out."""
    path = Path(name)
    metrics = path / "metrics.jsonl" if path.is_dir() else path
    if not metrics.is_file():
        what = "holds no metrics.jsonl" if path.is_dir() else "no such file or folder"
        raise ValueError(f"{name}: {what}; name a run folder (run.dir) or its metrics.jsonl")
    steps = _read_records(metrics, (LOSS, NORM))
    if not steps:
        raise ValueError(f"{metrics}: holds no complete step; let the run make one first")
    gradients = metrics.with_name("gradients.jsonl")
    if gradients.is_file():
        for step, record in _read_records(gradients, ("gradients",)).items():
            steps.get(step, {})["gradients"] = record["gradients"]
    return Recorded(name, steps, _read_configuration(metrics.with_name("config.yaml")))


def infer(a: Recorded, b: Recorded) -> Inference:
    """Which kind of comparison the two configurations make it. Raises ValueError where one is missing."""
    if a.run is None or b.run is None:
        missing = a.name if a.run is None else b.name
        raise ValueError(f"{missing}: no config.yaml beside it to tell the layout from; say --kind, see --help")
    before, after = flatten(a.run), flatten(b.run)
    differing = {n: (before[n], after[n]) for n in before if before[n] != after[n] and not _within(n, WITHOUT_EFFECT)}
    layout = {n: pair for n, pair in differing.items() if _within(n, LAYOUT) or n == PRECISION}
    training = {n: pair for n, pair in differing.items() if n not in layout}
    rounds_coarsely = "bf16" in (before[PRECISION], after[PRECISION])
    kind: Kind = "same-layout" if not layout else "bf16" if rounds_coarsely else "other-layout"
    return Inference(kind, layout, training)


def _within(name: str, fields: tuple[str, ...]) -> bool:
    return any(name == field or name.startswith(field + ".") for field in fields)


def _read_records(path: Path, needed: tuple[str, ...]) -> Records:
    """Step -> record. A last line without its end was cut by a kill, or is being written: it is left out."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: can't be read ({error}); name a run folder or its metrics.jsonl") from None
    records: Records = {}
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            missing = [name for name in ("step", *needed) if name not in record]
        except (ValueError, TypeError, RecursionError):
            raise ValueError(f"{path}: line {number} isn't JSON; is it the metrics.jsonl of a run?") from None
        if missing:
            raise ValueError(f"{path}: line {number} has no {missing[0]}; is it the metrics.jsonl of a run?")
        if wrong := [name for name in ("step", *needed) if not _is_numeric(name, record[name])]:
            raise ValueError(f"{path}: line {number}: {wrong[0]} is no number; is it the metrics.jsonl of a run?")
        records[record["step"]] = record
    return records


def _is_numeric(name: str, value: Any) -> bool:
    """Whether a record's value is a number where one belongs; "nan" and "inf" are, and so are all of `gradients`."""
    if name == "step":
        return isinstance(value, int)
    try:
        for number in value.values() if name == "gradients" else [value]:
            float(number)
    except (ValueError, TypeError, AttributeError, OverflowError):
        return False
    return True


def _read_configuration(path: Path) -> Run | None:
    if not path.is_file():
        return None
    try:
        return load_file(path)
    except ConfigError as error:
        first = str(error).splitlines()
        raise ValueError(f"{path}: can't be read by this version ({' '.join(x.strip() for x in first[1:2])})") from None
