"""If these fail, what a user wrote into a cluster's file runs as a command on every machine of a job."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from miras_launch.shell import assignments, chosen_by, exports, in_double_quotes, names_in, syntax_fault


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


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (['echo "a'], "looking for matching"),
        (["if true; then", "module load x"], "unexpected end of file"),
        (["cat <<END", "text"], "here-document"),
        (["echo a \\"], "ends with a backslash"),
        (["fi"], "syntax error near unexpected token"),
    ],
)
def test_what_is_open_at_the_end_is_found(lines: list[str], said: str) -> None:
    """It would take the job's own lines with it: a job that ends with 0 and has trained nothing."""
    assert said in (syntax_fault(lines) or "")


@pytest.mark.parametrize(
    "lines",
    [
        ["if true; then", "  module load x", "fi"],
        ["shopt -s extglob", "ls !(a|b)"],
        ["cat <<END", "it's", "END"],
        ["echo a\\\\", "touch ran", "echo \u00e9 \ud800"],
        ["source /nowhere/that/is.sh"],
    ],
)
def test_whole_shell_is_no_fault_and_is_not_run(
    lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site's working file must not be refused, nor do anything on the login node."""
    monkeypatch.chdir(tmp_path)
    assert syntax_fault(lines) is None and not list(tmp_path.iterdir())


def test_without_bash_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that submits need not have it."""
    monkeypatch.setenv("PATH", "/nowhere")
    assert syntax_fault(['echo "a']) is None


def test_the_names_are_those_that_are_filled_in() -> None:
    """One that is missed ends a job without a word; one too many refuses what runs."""
    assert names_in("/a/$X/${Y}_$X/${Z:-1}/$1/$$/\\$é") == ["X", "Y"]
