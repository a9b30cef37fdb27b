"""How a wrong configuration is told: every problem at once, each with field, value, rule and way out."""

from __future__ import annotations

from collections.abc import Sequence

from .words import counted


class ConfigError(ValueError):
    """What a user wrote can't be run; `str` is the whole message, a command prints it and exits with 2."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = tuple(problems)
        count = counted(len(problems), "problem")
        super().__init__("\n".join([f"{count} in {source}", *(f"  {problem}" for problem in problems)]))
