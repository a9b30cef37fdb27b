"""Slurm's commands, played by stand-ins, for the tests of jobs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

STAND_INS = {
    # plays ranks that take a moment: saves step SAVED, also when it is warned, and ends with CODE
    "srun": 'echo "srun $*" >> calls; trap "echo warned >> calls; kill %1" USR1; sleep "${SECONDS_OF_WORK:-0}" & wait; '
    'printf step_%08d "$SAVED" > "$RUN/checkpoints/latest"; for w in "$@"; do case "$w" in --output=*) '
    'echo "miras-train: as it went" >> "$(echo "${w#--output=}" | sed s/%t/0/)";; esac; done; exit "$CODE"',
    "squeue": '[ "$STATE" = unknown ] || echo "${STATE:-RUNNING}"',
    "scontrol": 'echo "scontrol $*" >> calls',
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run in, with Slurm's commands played by stand-ins."""
    (tmp_path / "bin").mkdir()
    for name, text in STAND_INS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path
