"""If these fail, a run with something to mend is started again and again, since a launcher told another rank's code."""

from __future__ import annotations

from pathlib import Path

import pytest

from miras_megatron.parallel.exit_code import VARIABLE, tell_exit_code, told_exit_code


def test_the_first_rank_that_speaks_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All others may only have lost that one; each still ends with its own code."""
    path = tmp_path / "logs/exit_code"
    monkeypatch.setenv(VARIABLE, str(path))
    assert told_exit_code(path) is None
    assert (tell_exit_code(3), tell_exit_code(2)) == (3, 2)
    assert told_exit_code(path) == 3


def test_a_rank_that_cannot_write_ends_with_its_code_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk must not turn something to mend into a traceback; nor a hand-started rank without the file."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file/exit_code"))
    assert tell_exit_code(2) == 2
    monkeypatch.delenv(VARIABLE)
    assert tell_exit_code(2) == 2
    (tmp_path / "file").write_text("rubbish")
    assert told_exit_code(tmp_path / "file") is None
