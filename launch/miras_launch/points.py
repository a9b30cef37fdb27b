"""The runs that one command starts: one, or a point of a sweep's grid each, with a folder of its own."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from miras_megatron.config.check import find_problems
from miras_megatron.config.errors import ConfigError
from miras_megatron.config.load import parse_command_line
from miras_megatron.config.overrides import with_fields
from miras_megatron.config.schema import Run


@dataclass(frozen=True)
class Point:
    """A run, and the words of miras-train that start it."""

    run: Run
    words: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """run.dir."""
        return Path(self.run.run.dir)

    @property
    def finished(self) -> bool:
        """Whether the run's newest checkpoint is of its last step."""
        return saved_step(self.folder) >= self.run.training.steps


def saved_step(run_dir: Path) -> int:
    """Steps that the newest checkpoint of a run has behind it, as `latest` says; 0 where there is none."""
    try:
        name = (run_dir / "checkpoints/latest").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return 0
    match = re.fullmatch(r"step_(\d+)", name)
    return int(match[1]) if match else 0


def points_of(words: Sequence[str], source: str, run: Run, sweep: Sequence[str], world_size: int) -> list[Point]:
    """The runs of a command line.

    words   those of miras-train: CONFIG and overrides
    run     what they say without the sweep; its run.dir holds the folders of a sweep's points
    sweep   field=a,b,c each; every combination is a run
    Raises ConfigError with the problems of all of them, each told once.
    """
    if not sweep:
        points = [Point(run, tuple(words))]
    else:
        points = [_point(words, run, choice) for choice in grid(sweep)]
    problems: dict[str, None] = {}
    for point in points:
        problems |= dict.fromkeys(find_problems(point.run, world_size))
    folders = Counter(point.folder for point in points)
    for folder in (folder for folder, count in folders.items() if count > 1):
        problems[f"--sweep: two values make a folder's name alike, {folder.name}; sweep them apart"] = None
    problems |= dict.fromkeys(_twice(points))
    if problems:
        raise ConfigError(source, list(problems))
    return points


def _twice(points: Sequence[Point]) -> Iterator[str]:
    """Points that differ in their words alone, such as 1e-3 and 1.0e-3."""
    seen: dict[str, str] = {}
    for point in points:
        name, content = point.folder.name, repr(replace(point.run, run=replace(point.run.run, dir="")))
        if seen.setdefault(content, name) != name:
            yield f"--sweep: {seen[content]} and {name} are the same run; keep one"


def grid(sweep: Sequence[str]) -> list[dict[str, str]]:
    """Every combination of field=a,b,c, as field -> value. Raises ConfigError."""
    axes: dict[str, list[str]] = {}
    problems = []
    for text in sweep:
        name, equals, values = text.partition("=")
        each = split_values(values)
        if not equals or not name or not all(each):
            problems.append(f"{text!r}: must be field=a,b,c, such as optimizer.lr=1e-3,3e-3")
        elif len(set(each)) < len(each):
            problems.append(f"{text!r}: a value is given twice; keep one")
        elif name in axes:
            problems.append(f"{text!r}: {name} is swept twice; put all its values in one")
        elif name in ("run.dir", "run.name"):
            problems.append(f"{text!r}: every point has a folder of its own already; sweep another field")
        axes[name] = each
    if problems:
        raise ConfigError("--sweep", problems)
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def split_values(text: str) -> list[str]:
    """a,b,c at the commas outside brackets and quotes: a list is one value."""
    return [part.strip() for part in re.split(r""",(?![^\[{]*[\]}])(?=(?:[^"']*["'][^"']*["'])*[^"']*$)""", text)]


def _point(words: Sequence[str], base: Run, choice: dict[str, str]) -> Point:
    """One point; `base` is the run of `words`. Raises ConfigError with every problem of its values."""
    folder = os.path.join(base.run.dir, ",".join(_named(choice)))
    own = (*_without("run.dir", words), *(f"--{name}={value}" for name, value in choice.items()), f"--run.dir={folder}")
    run = with_fields(base, choice)
    if run is None:
        return Point(parse_command_line(own, prog="miras-launch", description="").run, own)
    return Point(replace(run, run=replace(run.run, dir=folder)), own)


def _without(name: str, words: Sequence[str]) -> Iterator[str]:
    """The words without those that set a field, --name=value or --name value."""
    rest = iter(words)
    for word in rest:
        said, equals, _ = word.lstrip("-").partition("=")
        if not word.startswith("-") or said != name:
            yield word
        elif not equals:
            next(rest, None)


def _named(choice: dict[str, str]) -> Iterator[str]:
    """field=value as parts of a folder's name; the section only where two fields would be called alike."""
    last = [name.rpartition(".")[2] for name in choice]
    for (name, value), short in zip(choice.items(), last, strict=True):
        shown = name if last.count(short) > 1 else short
        yield f"{shown}={re.sub(r'[^A-Za-z0-9_.+-]+', '_', value)}"
