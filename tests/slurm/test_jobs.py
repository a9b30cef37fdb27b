"""If these fail, a run on a cluster doesn't start, doesn't survive its time limit, or comes back with other numbers.

A real Slurm, on one host (`make test-slurm`): both nodes share an address, so names of machines, cgroups, GPUs and a
network between hosts aren't covered.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from helpers.one_host_slurm import OneHostSlurm
from helpers.tiny_run import learned, tiny_config
from miras_launch.points import saved_step

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

CLUSTER = """\
nodes: {nodes}
ranks_per_node: {ranks}
gpus_per_node: 0
cpus_per_rank: 1
signal_lead: 30
max_requeues: 3
doctor: {doctor}
free_gib: 0.1
environment: {{OMP_NUM_THREADS: "1", MASTER_ADDR: 127.0.0.1, GLOO_SOCKET_IFNAME: lo}}
{more}
"""
"""Both nodes are this host, which doesn't know them by name: hence the address."""

PATIENCE = 300.0
"""seconds for a job of some steps on a busy machine"""


def launch(slurm: OneHostSlurm, folder: Path, words: list[str], **cluster: object) -> tuple[int, str]:
    """miras-launch as on a login node, from `folder`; exit code and all it said."""
    given = {"nodes": 2, "ranks": 2, "doctor": "false", "more": ""} | cluster
    (folder / "cluster.yaml").write_text(CLUSTER.format(**given))
    line = [sys.executable, "-m", "miras_launch.main", *words, "--cluster=./cluster.yaml"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        line,
        cwd=folder,
        env=slurm.environment | {"PATH": path, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def submitted(slurm: OneHostSlurm, folder: Path, words: list[str], **cluster: object) -> str:
    """The number of the job."""
    code, said = launch(slurm, folder, words, **cluster)
    assert code == 0, said
    return re.findall(r"submitted job (\d+)", said)[0]


def ended(slurm: OneHostSlurm, job: str, folder: Path) -> None:
    """Wait for a job that must end well; its logs are the message where it doesn't."""
    over = slurm.wait_for(lambda: set(slurm.state(job).split()) <= {"COMPLETED", "FAILED", "CANCELLED"}, PATIENCE)
    logs = "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(folder.rglob("logs/*.log")))
    assert over and set(slurm.state(job).split()) == {"COMPLETED"}, f"{slurm.state(job)}\n{logs}\n{slurm.logs()}"


STEPS = 24


def run_words(folder: Path) -> list[str]:
    """A run that saves every step: slow enough, on any machine, to be caught in the middle."""
    return tiny_config(folder, parallel__context=2, training__steps=STEPS, checkpoint__every=1, checkpoint__keep=2)


def kill_rank(job: str, rank: int) -> None:
    """SIGKILL to the process of a rank, as the kernel's killer of large processes would."""
    wanted = {"SLURM_JOB_ID": job, "SLURM_PROCID": str(rank)}
    for process in psutil.process_iter(["environ", "cmdline"]):
        variables, words = process.info["environ"] or {}, process.info["cmdline"] or []
        if wanted.items() <= variables.items() and any(word.endswith("miras-train") for word in words):
            process.kill()


@pytest.fixture(scope="module")
def undisturbed(slurm: OneHostSlurm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on two nodes of two ranks that nobody disturbed, with its job's preflight."""
    folder = tmp_path_factory.mktemp("undisturbed")
    job = submitted(slurm, folder, run_words(folder), doctor="true")
    ended(slurm, job, folder)
    return folder / "run"


def test_two_nodes_of_two_ranks_train(undisturbed: Path) -> None:
    """From one command to the last step: preflight, four ranks, a log each, the job's own log as summary."""
    assert [step for step, _, _ in learned(undisturbed)] == list(range(1, STEPS + 1))
    logs = undisturbed / "logs"
    assert {path.name for path in logs.glob("rank_*.log")} == {f"rank_{rank}.log" for rank in range(4)}
    (job,) = logs.glob("job_*.log")
    said = job.read_text()
    assert "start 1 on n[1-2]: 2 nodes of 2 ranks" in said and f"through: {STEPS} steps" in said
    assert "n1" in (logs / "doctor.log").read_text() and "n2" in (logs / "doctor.log").read_text()


def test_a_warned_job_and_one_that_lost_a_rank_come_back_with_the_same_numbers(
    slurm: OneHostSlurm, undisturbed: Path, tmp_path: Path
) -> None:
    """Cut by Slurm's warning, then by a killed rank: losses and gradient norms are those of the undisturbed run."""
    run = tmp_path / "run"
    job = submitted(slurm, tmp_path, run_words(tmp_path))
    assert slurm.wait_for(lambda: saved_step(run) >= 1, PATIENCE)
    slurm.call("scancel", "--signal=USR1", "--batch", job)  # what --signal=B:USR1@30 sends before the time limit
    (log,) = (run / "logs").glob("job_*.log")
    assert slurm.wait_for(lambda: "start 2 on" in log.read_text(), PATIENCE), log.read_text()
    stopped = int(re.findall(rf"saved at step (\d+) of {STEPS}; into the queue again", log.read_text())[0])
    assert (
        1 <= stopped < STEPS
        and f"start 2 on n[1-2]: 2 nodes of 2 ranks; at step {stopped} of {STEPS}" in log.read_text()
    )
    assert slurm.wait_for(lambda: saved_step(run) > stopped, PATIENCE)
    kill_rank(job, 3)
    ended(slurm, job, tmp_path)
    said = log.read_text()
    assert "asked to save and stop" in said and "task 3: Killed" in said and "start 3 on n[1-2]" in said
    assert learned(run) == learned(undisturbed)


STAGGERED = """\
#!/bin/bash
if [ "$SLURM_PROCID" = 2 ]; then sleep 1; echo 2 > "$MIRAS_EXIT_CODE"; exit 2; fi
sleep 3
exit 4
"""
"""Rank 2 has something to mend, and the others lose it."""


def test_a_jobs_code_is_the_first_causes(slurm: OneHostSlurm, tmp_path: Path) -> None:
    """Of 2 and then three times 4 srun tells the highest, and a signal where it kills: both are queued again."""
    program = tmp_path / "bin/miras-train"
    program.parent.mkdir()
    program.write_text(STAGGERED)
    program.chmod(0o755)
    job = submitted(slurm, tmp_path, run_words(tmp_path), more=f"programs: {program.parent}")
    assert slurm.wait_for(lambda: slurm.state(job) == "FAILED", PATIENCE), slurm.state(job)
    assert "ExitCode=2:0" in slurm.call("scontrol", "show", "job", job)
    (log,) = (tmp_path / "run/logs").glob("job_*.log")
    assert "ranks ended with exit code 2" in log.read_text() and "start 2" not in log.read_text()


def test_a_sweep_is_an_array_and_goes_on_where_it_is_not_through(slurm: OneHostSlurm, tmp_path: Path) -> None:
    """Three points train side by side, each in a folder of its own; submitted again, only what is left is."""
    words = [*tiny_config(tmp_path, training__steps=3), "--sweep=optimizer.lr=1e-3,2e-3,4e-3"]
    job = submitted(slurm, tmp_path, words, nodes=1, ranks=1)
    ended(slurm, job, tmp_path)
    folders = [tmp_path / f"run/lr={rate}" for rate in ("1e-3", "2e-3", "4e-3")]
    losses = {tuple(loss for _, loss, _ in learned(folder)) for folder in folders}
    assert len(losses) == 3 and all(len(curve) == 3 for curve in losses)
    code, said = launch(slurm, tmp_path, words, nodes=1, ranks=1)
    assert code == 0 and "nothing left to do" in said
    code, said = launch(slurm, tmp_path, [*words[:-1], words[-1] + ",8e-3", "--dry-run"], nodes=1, ranks=1)
    assert code == 0 and "#SBATCH --array=3\n" in said


def test_a_wrong_partition_is_one_message(slurm: OneHostSlurm, tmp_path: Path) -> None:
    """The file, the field, what Slurm said, and the partitions there are; nothing is queued."""
    code, said = launch(slurm, tmp_path, tiny_config(tmp_path), more="partition: nope", nodes=1, ranks=1)
    assert code == 2
    told = said[said.index("miras-launch: ") :]
    assert told.startswith("miras-launch: 1 problem in cluster.yaml\n") and "invalid partition specified: nope" in told
    assert told.rstrip().endswith("partition = 'nope': Slurm has debug")
    assert "nope" not in slurm.call("squeue", "--noheader", "--format=%P")
