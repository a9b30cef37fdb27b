"""If these fail, what Slurm or a disk says against a job ends in a traceback, or is blamed on the wrong file."""

from __future__ import annotations

from pathlib import Path

import pytest
from miras_launch.main import main

DEBUG = str(Path(__file__).resolve().parents[2] / "configs/runs/debug_cpu.yaml")


def test_a_machine_without_slurm_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not a traceback of subprocess."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([DEBUG, "--cluster=slurm_cpu", "--training.micro_batch=1"]) == 2
    said = capsys.readouterr().err
    assert (
        "launcher = 'slurm': sbatch isn't on this machine" in said and "sbatch runs/debug_cpu/launch/job.sbatch" in said
    )


def test_a_folder_that_takes_no_files_is_one_message(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not a traceback of pathlib."""
    (place / "runs").write_text("a file")
    assert main([DEBUG, "--cluster=slurm_cpu", "--training.micro_batch=1"]) == 2
    said = capsys.readouterr().err
    assert (
        "1 problem in run.dir = runs/debug_cpu\n  runs/debug_cpu" in said and "Not a directory); choose another" in said
    )


def test_slurms_refusal_is_one_message_with_the_field(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A typo in partition must name the file where it stands, and what there is."""
    said = "sbatch: error: invalid partition specified: nope"
    for name, text in {"sbatch": f"echo '{said}' >&2; exit 1", "sinfo": "echo long; echo short"}.items():
        (place / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (place / "bin" / name).chmod(0o755)
    (place / "mine.yaml").write_text("partition: nope\nnodes: 1\nranks_per_node: 2\n")
    assert main([DEBUG, "--cluster=./mine.yaml"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("miras-launch: 1 problem in mine.yaml\n  Slurm refused runs/debug_cpu/launch/job.sbatch: ")
    assert "invalid partition specified: nope; partition = 'nope': Slurm has long, short" in told


DOWN = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"
STARS = "*" * 41
PING = f"Slurmctld(primary) at head is DOWN\n{STARS}\n** RESTORE SLURMCTLD DAEMON TO SERVICE **\n{STARS}"


def told_by(place: Path, capsys: pytest.CaptureFixture[str], **commands: str) -> str:
    """What miras-launch says where Slurm's commands are these."""
    for name, text in commands.items():
        (place / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (place / "bin" / name).chmod(0o755)
    assert main([DEBUG, "--cluster=slurm_cpu", "--training.micro_batch=1"]) == 2
    return capsys.readouterr().err


def test_a_controller_that_does_not_answer_is_not_the_cluster_files_fault(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user would look for the mistake in a file that has none; the words are those of Slurm 22.05."""
    told = told_by(place, capsys, sbatch=f"echo '{DOWN}' >&2; exit 1", scontrol=f"echo '{PING}'; exit 1")
    assert told == (
        "miras-launch: 1 problem in Slurm\n  its controller (slurmctld) doesn't answer: Batch job submission failed: "
        "Unable to contact slurm controller (connect failure); scontrol ping says: Slurmctld(primary) at head is DOWN; "
        "ask those who run the cluster, then the same command again, or: sbatch runs/debug_cpu/launch/job.sbatch\n"
    )
    told = told_by(place, capsys, scontrol="exit 1")
    assert "(connect failure); scontrol ping and sinfo say whether it is up; ask those" in told


def test_a_machine_of_no_cluster_is_told_so(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Slurm's programs are installed here, and no slurm.conf."""
    told = told_by(place, capsys, sbatch="echo 'sbatch: fatal: Could not establish a configuration source' >&2; exit 1")
    assert told.startswith("miras-launch: 1 problem in Slurm\n  this machine doesn't know its cluster: Could not")
    assert "name slurm.conf in SLURM_CONF, or go to a login node" in told
