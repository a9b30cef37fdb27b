"""DeepSpeed is started only where it is, and never waits for what will not come."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import time
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
from helpers.tiny_run import tiny_config

from miras_megatron.parallel import zero
from miras_megatron.parallel.zero import refuse_without_deepspeed, wait_for_other_compilations
from miras_megatron.training.main import main


def test_a_run_without_deepspeed_is_told_how_to_get_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise a job that waited for its nodes ends with a traceback; nothing is written before either."""
    argv = tiny_config(tmp_path, optimizer__engine="deepspeed")

    def nothing(name: str) -> object:
        return None if name == "deepspeed" else find_spec(name)

    with mock.patch.object(importlib.util, "find_spec", nothing):
        with pytest.raises(ValueError, match="pip install deepspeed=="):
            refuse_without_deepspeed()
        assert main(argv) == 2
    assert 'optimizer.engine = "deepspeed": DeepSpeed is not installed here; pip install' in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_another_deepspeed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is touched of its insides may mean something else there, and would train something else."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for version, known in {"0.19.8": True, "0.19.8+1f2e3d4": True, "0.19.80": False, "0.20.0": False}.items():
        monkeypatch.setattr(importlib.metadata, "version", lambda name, version=version: version)
        with contextlib.nullcontext() if known else pytest.raises(ValueError, match=f"DeepSpeed {version} is"):
            refuse_without_deepspeed()


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a compilation that goes on."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    wait_for_other_compilations()
    path = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def test_a_lock_of_a_killed_compilation_is_named(lock: Path) -> None:
    """DeepSpeed waits for such a file forever and says nothing."""
    long_ago = time.time() - zero.LOCK_IS_OLD - 5
    os.utime(lock, (long_ago, long_ago))
    with pytest.raises(ValueError, match="cpu_adam/lock is 30[5-9] s old: it was left by a compilation"):
        wait_for_other_compilations()


def test_another_run_that_compiles_is_waited_for(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of a sweep start together: all but the first would end with exit code 2, which nobody starts again."""
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            lock.unlink()

    monkeypatch.setattr(zero.time, "sleep", sleep)
    wait_for_other_compilations()
    assert len(looks) == 3
