"""A run waits for another's compilation, and never for one that will not come."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from miras_megatron.parallel import zero_compile
from miras_megatron.parallel.zero_compile import LONGEST, NO_PROGRESS, compiling_alone


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """torch's, of a compilation; without it nothing is waited for."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with compiling_alone():
        pass
    path = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def pass_time(monkeypatch: pytest.MonkeyPatch, seconds: float, look: object = lambda: None) -> list[float]:
    """Every pause lasts so many seconds, and `look` is called in it; the pauses."""
    now, pauses = [0.0], list[float]()

    def sleep(pause: float) -> None:
        now[0] += seconds
        pauses.append(now[0])
        look()  # type: ignore[operator]

    monkeypatch.setattr(zero_compile, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    return pauses


def test_the_lock_of_a_killed_run_is_taken_away(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that was cancelled in its first minute would cost the next one its start."""
    pauses = pass_time(monkeypatch, 1.0)
    lock.unlink()
    with pytest.raises(KeyboardInterrupt), compiling_alone():
        lock.touch()
        raise KeyboardInterrupt
    assert lock.exists()
    with compiling_alone():
        assert not lock.exists()
    assert not pauses


def test_another_run_of_ours_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The runs of a sweep start together: all but the first would end with exit code 2, which nobody starts again."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with open(tmp_path / "miras_cpu_adam.lock", "a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        pauses = pass_time(monkeypatch, 1.0, lambda: len(pauses) == 5 and fcntl.flock(other, fcntl.LOCK_UN))
        with compiling_alone():
            pass
        assert len(pauses) == 5 and "waiting for another run" in capsys.readouterr().out
        fcntl.flock(other, fcntl.LOCK_EX)
        pass_time(monkeypatch, LONGEST / 3)
        with pytest.raises(ValueError, match="another run holds .*miras_cpu_adam.lock for 1800 s"), compiling_alone():
            pass


def test_a_lock_of_anothers_beside_which_nothing_changes_is_named(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed waits for such a file forever and says nothing."""
    pass_time(monkeypatch, NO_PROGRESS / 4)
    with pytest.raises(ValueError, match="nothing has changed beside .*cpu_adam/lock for 300 s"), compiling_alone():
        pass


def test_another_program_that_compiles_is_waited_for(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a loaded machine a compilation takes many times as long as on a quiet one, but its files change."""

    def compile_on() -> None:
        made = lock.parent / "adam.o"
        made.touch()
        os.utime(made, (len(pauses) * 1e9, len(pauses) * 1e9))
        if len(pauses) == 9:
            lock.unlink()

    pauses = pass_time(monkeypatch, NO_PROGRESS / 2, compile_on)
    with compiling_alone():
        assert len(pauses) == 9
