"""DeepSpeed is started only where it is, and never waits for what will not come."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
from helpers.tiny_run import tiny_config

from miras_megatron.parallel.zero import refuse_without_deepspeed
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


def test_a_folder_of_that_name_is_no_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout of its sources in the working directory is imported first, and knows no version."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())

    def unknown(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", unknown)
    with pytest.raises(ValueError, match="DeepSpeed of no known version is installed"):
        refuse_without_deepspeed()
