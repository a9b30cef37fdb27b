"""If these fail, what a user wrote into a cluster's file runs as a command on every machine of a job."""

from __future__ import annotations

import subprocess

import pytest
from miras_launch.shell import assignments, chosen_by, exports, in_double_quotes


def printed(lines: str, **variables: str) -> str:
    done = subprocess.run(["bash", "-uc", lines], env=variables, capture_output=True, text=True, timeout=20, check=True)
    return done.stdout


@pytest.mark.parametrize(
    ("value", "filled"),
    [
        ('a"b`id`\\c$MIRAS_X', 'a"b`id`\\cd'),
        ("${MIRAS_X}e", "de"),
        ("$(id) $((1 + 1)) $[1 + 1]", "$(id) $((1 + 1)) $[1 + 1]"),
        ("${MIRAS_é}${é}", "${MIRAS_é}${é}"),
        ("${MIRAS_X:-$(id)} ${#MIRAS_X} $1 $$ 5$", "${MIRAS_X:-$(id)} ${#MIRAS_X} $1 $$ 5$"),
    ],
)
def test_values_are_filled_in_but_never_run(value: str, filled: str) -> None:
    """$USER is wanted; a quote must not end the line, nor anything start a command."""
    assert printed(f"printf %s {in_double_quotes(value)}", MIRAS_X="d") == filled


def test_variables_may_build_on_each_other() -> None:
    """A path that is said once is not repeated."""
    lines = "\n".join(exports({"BASE": "$HOME/x", "SUB": "$BASE/y"}))
    assert printed(f'{lines}\nprintf %s "$SUB"', HOME="/h") == "/h/x/y"


def test_a_task_picks_its_line() -> None:
    """The wrong one trains a point of a sweep twice, and another never; names of folders may hold anything."""
    lines = [assignments({"steps": n, "run_dir": f"a b/$(id) '{n}'"}) for n in range(3)]
    assert printed(f'{chosen_by("N", lines)}\nprintf %s "$steps $run_dir"', N="2") == "2 a b/$(id) '2'"
