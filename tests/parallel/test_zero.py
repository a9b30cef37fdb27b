"""DeepSpeed is started only where it is, and never waits for what will not come."""

from __future__ import annotations

import importlib.util
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
from helpers.tiny_run import tiny_config

from miras_megatron.parallel.zero import refuse_left_locks, refuse_without_deepspeed
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


def test_a_lock_of_a_killed_compilation_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed waits for such a file forever and says nothing."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    refuse_left_locks()
    folder = tmp_path / "py311_cpu" / "cpu_adam"
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    with pytest.raises(ValueError, match="cpu_adam/lock was left by a compilation that was killed"):
        refuse_left_locks()
