"""If this fails, a cluster whose only way of starting ranks is MPI can't train."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.mpi import find_mpirun
from helpers.tiny_run import learned, tiny_config

from miras_megatron.training.main import main

FOUR_RANKS = """\
launcher: mpi
ranks_per_node: 4
mpirun: [{mpirun}, --allow-run-as-root, --oversubscribe, --bind-to, none]
gpus_per_node: 0
free_gib: 0.1
environment: {{OMP_NUM_THREADS: "1"}}
"""
"""Open MPI wants to be told that root, and more ranks than cores, are meant."""


@pytest.mark.mpi
@pytest.mark.slow
def test_four_ranks_of_mpirun_train_as_one_process(tmp_path: Path) -> None:
    """Two share every row, two see other rows: losses and gradient norms are those of one process."""
    (tmp_path / "mpi.yaml").write_text(FOUR_RANKS.format(mpirun=find_mpirun()))
    words = tiny_config(tmp_path, "four", parallel__context=2, training__steps=3)
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join(str(root / part) for part in (".", "kernels", "launch", "tools"))
    done = subprocess.run(
        [sys.executable, "-m", "miras_launch.main", f"--cluster={tmp_path / 'mpi.yaml'}", *words],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "miras-doctor: nothing found; 4 ranks by mpi" in done.stdout
    assert "4 rank(s)" in done.stdout and "done: 3 steps" in done.stdout
    assert main(tiny_config(tmp_path, "one", training__steps=3)) == 0
    for (step, loss, norm), (_, one_loss, one_norm) in zip(
        learned(tmp_path / "four"), learned(tmp_path / "one"), strict=True
    ):
        assert loss == pytest.approx(one_loss, rel=1e-6), step
        assert norm == pytest.approx(one_norm, rel=1e-5), step
