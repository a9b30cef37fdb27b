"""If these fail, a job of many ranks starts, and dies on all of them, for what one line could have said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from miras_launch.main import main

ROOT = Path(__file__).resolve().parents[2]
DEBUG = str(ROOT / "configs/runs/debug_cpu.yaml")


def test_a_dry_run_shows_layout_and_command(capsys: pytest.CaptureFixture[str]) -> None:
    """The command is what a person would type, to be copied into a job script."""
    assert main(["--ranks", "4", "--parallel.tensor=2", DEBUG, "--dry-run"]) == 0
    layout, memory, line = capsys.readouterr().out.strip().splitlines()
    assert layout == ("4 ranks = 2 data x 2 tensor x 1 pipeline x 1 context; 8 rows a step in 1 microbatch of 4 a rank")
    assert memory.startswith("memory a rank: at least 0.0") and "parameters" in memory
    assert "--nproc-per-node 4 --standalone --no-python" in line
    assert line.endswith(f"miras-train --parallel.tensor=2 {DEBUG}")


def test_several_machines_meet_at_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    """The same line runs on every machine but for its number."""
    words = ["--ranks=2", "--nodes=2", "--node-rank=1", "--rendezvous", "first:29500", DEBUG, "--dry-run"]
    assert main([*words, "--training.micro_batch=1"]) == 0
    line = capsys.readouterr().out
    assert "--nnodes 2 --node-rank 1 --rdzv-backend c10d --rdzv-endpoint first:29500" in line


def test_a_layout_that_does_not_divide_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and every problem at once, before any process starts."""
    assert main(["--ranks", "3", "--parallel.tensor=2", "--model.heads=3", DEBUG]) == 2
    said = capsys.readouterr().err
    assert "parallel.tensor x pipeline x context = 2: this job has 3 ranks" in said
    assert "model.heads = 3" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes=2"], "nodes = 2: torchrun must know where they meet; start this on every machine with --rendezvous"),
        (["--nodes=2", "--rendezvous=a:1", "--node-rank=2"], "--node-rank 2: must be from 0 to 1, with 2 nodes"),
        (["--cluster=slurm_cpu", "--node-rank=0"], "--node-rank 0: launcher slurm finds its machines by itself"),
        (["--cluster=mpi_1x8", "--rendezvous=a:1"], "--rendezvous a:1: launcher mpi finds its machines by itself"),
    ],
)
def test_where_machines_meet_is_said_where_it_is_needed_and_nowhere_else(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two machines would wait for each other at two places, ten minutes long; or a wish is silently ignored."""
    assert main([DEBUG, *words, "--training.micro_batch=1", "--dry-run"]) == 2
    assert message in capsys.readouterr().err


def test_a_word_that_is_no_number_is_told_by_the_command_that_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    """ "main.py: error" in a log of ten commands says of none of them that it is meant."""
    with pytest.raises(SystemExit) as ended:
        main([DEBUG, "--nodes=abc"])
    assert ended.value.code == 2
    assert "miras-launch: error: argument --nodes: invalid int value: 'abc'" in capsys.readouterr().err


@pytest.mark.parametrize(("module", "package"), [("jsonargparse", "jsonargparse"), ("yaml", "PyYAML")])
def test_a_login_node_without_a_package_is_told_its_name(module: str, package: str, tmp_path: Path) -> None:
    """A traceback of imports says neither what to install nor that torch isn't needed for it."""
    (tmp_path / f"{module}.py").write_text(f"raise ModuleNotFoundError('none', name={module!r})")
    path = os.pathsep.join([str(tmp_path), *(str(ROOT / part) for part in (".", "launch"))])
    done = subprocess.run(
        [sys.executable, "-m", "miras_launch.main", DEBUG, "--dry-run"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == f"miras-launch: {package} isn't installed here: pip install pyyaml jsonargparse\n"


def test_one_of_a_thing_is_not_many(capsys: pytest.CaptureFixture[str]) -> None:
    """ "1 ranks" reads as a program that nobody has looked at."""
    words = ["--training.global_batch=1", "--training.micro_batch=1", "--sweep=optimizer.lr=1e-3", "--dry-run"]
    assert main([DEBUG, *words]) == 0
    told = capsys.readouterr().out
    assert (
        told.startswith("1 run: lr=1e-3\n1 rank = 1 data x ") and "; 1 row a step in 1 microbatch of 1 a rank" in told
    )
    assert main([DEBUG, "--node-rank=1", "--dry-run"]) == 2
    assert "must be from 0 to 0, with 1 node\n" in capsys.readouterr().err


def test_a_reader_of_a_dry_run_may_leave_early() -> None:
    """`miras-launch CONFIG --dry-run | head -3` is how one looks at a layout."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "miras_launch.main", DEBUG, "--dry-run"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
