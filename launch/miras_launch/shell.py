"""Words and lines of shell for a job's script: what a user wrote stays a word, whatever is in it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from string import Template

PATIENCE = 10.0
"""seconds for bash to read some lines"""


class Script(Template):
    """Shell is full of $; here @@name is filled in."""

    delimiter = "@@"


def template(name: str) -> Script:
    """A file of templates/."""
    return Script(resources.files(__package__ or "miras_launch").joinpath("templates", name).read_text("utf-8"))


def in_double_quotes(value: str) -> str:
    """A word of shell in which only the names of `names_in` are filled in: no command runs, nothing is computed."""
    for sign in '\\"`':
        value = value.replace(sign, "\\" + sign)
    value = re.sub(r"\$(?![A-Za-z_]|\{[A-Za-z_]\w*\})", r"\\$", value, flags=re.ASCII)
    return f'"{value}"'


def names_in(value: str) -> list[str]:
    """The variables that `value` names as $NAME or ${NAME}, each once."""
    found = re.findall(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})", value, flags=re.ASCII)
    return list(dict.fromkeys(plain or braced for plain, braced in found))


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


def syntax_fault(lines: Sequence[str]) -> str | None:
    """What bash says of lines that don't end what they open, such as a quote; None where all is well, or no bash here.

    Nothing of them is run. Patterns of extglob count as right, since the lines may switch them on.
    """
    text = "\n".join(lines)
    if re.search(r"(?<!\\)(\\\\)*\\$", text):
        return "its last line ends with a backslash, which takes the next line of the script"
    if (bash := shutil.which("bash")) is None:
        return None
    try:
        done = subprocess.run(
            [bash, "--norc", "-O", "extglob", "-n"],
            input=f"{text}\n".encode("utf-8", "replace"),
            env={"PATH": os.defpath, "LC_ALL": "C"},
            capture_output=True,
            timeout=PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    said = done.stderr.decode("utf-8", "replace").splitlines()
    return "; ".join(line.removeprefix(f"{bash}: ") for line in said) or None  # an open here-document is a warning only
