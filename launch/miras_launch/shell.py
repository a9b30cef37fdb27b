"""Words and lines of shell for a job's script: what a user wrote stays a word, whatever is in it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from string import Template


class Script(Template):
    """Shell is full of $; here @@name is filled in."""

    delimiter = "@@"


def template(name: str) -> Script:
    """A file of templates/."""
    return Script(resources.files(__package__ or "miras_launch").joinpath("templates", name).read_text("utf-8"))


def in_double_quotes(value: str) -> str:
    """A word of shell in which only $NAME and ${NAME} are filled in: no command runs, nothing is computed."""
    for sign in '\\"`':
        value = value.replace(sign, "\\" + sign)
    value = re.sub(r"\$(?![A-Za-z_]|\{[A-Za-z_]\w*\})", r"\\$", value, flags=re.ASCII)
    return f'"{value}"'


def exports(variables: Mapping[str, str]) -> Iterator[str]:
    """A line for each; $NAME in a value is filled in on the machine."""
    for name, value in variables.items():
        yield f"export {name}={in_double_quotes(value)}"


def assignments(values: Mapping[str, object]) -> str:
    """name=value .. in one line, each value as it is."""
    return " ".join(f"{name}={shlex.quote(str(value))}" for name, value in values.items())


def chosen_by(variable: str, lines: Sequence[str]) -> str:
    """Run line n where `variable` is n."""
    return "\n".join([f"case ${variable} in", *(f"  {n}) {line} ;;" for n, line in enumerate(lines)), "esac"])
