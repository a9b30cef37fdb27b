"""A rendered job's files written, and its script handed to sbatch; what Slurm says against it, told by field."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

from miras_megatron.config.errors import ConfigError

from .cluster import Cluster
from .slurm import Job

UNREACHED = (
    "unable to contact slurm controller",
    "connect failure",
    "connection refused",
    "timed out on send/recv",
    "zero bytes were transmitted",
)
"""Of sbatch's words: nobody answered, so nobody has looked at the job."""

NOT_OF_A_CLUSTER = ("could not establish a configuration source", "unable to process configuration file")
"""sbatch's words where it finds no slurm.conf."""

PATIENCE = 20.0
"""seconds for scontrol's own waiting"""


def submit(job: Job, cluster: Cluster, where: str) -> int:
    """Write the job's files and hand the script to sbatch. Raises ConfigError where Slurm doesn't take it."""
    if not job.open:
        print(f"miras-launch: nothing left to do, {job.path.parent.parent} is at its last step already")
        return 0
    _write(job)
    number = _sbatch(job.path, cluster, where)
    print(f"submitted job {number}: {job.path}; squeue -j {number}; scancel {number}")
    return 0


def _write(job: Job) -> None:
    """The job's files. Raises ConfigError where a folder doesn't take them."""
    folder = job.path.parent.parent
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        for path, text in {**job.files, job.path: job.script}.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"run.dir = {folder}",
            [f"{error.filename or folder}: can't be written ({error.strerror or error}); choose another folder"],
        ) from None


def _sbatch(path: Path, cluster: Cluster, where: str) -> str:
    """The job's number."""
    try:
        done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        way_out = f"run this on a login node of the cluster, or there: sbatch {path}; --cluster local trains here"
        raise ConfigError(where, [f"launcher = 'slurm': sbatch isn't on this machine; {way_out}"]) from None
    if done.returncode:
        raise _refusal(path, done.stderr, cluster, where)
    return done.stdout.strip().partition(";")[0]


def _refusal(path: Path, said: str, cluster: Cluster, where: str) -> ConfigError:
    """What sbatch's complaint means: no Slurm behind it, or a job that Slurm doesn't take as `where` has it."""
    lines = [line.removeprefix("sbatch: error: ").removeprefix("sbatch: fatal: ") for line in said.splitlines()]
    told, again = ", ".join(lines), f"then the same command again, or: sbatch {path}"
    if any(sign in said.lower() for sign in UNREACHED):
        problem = (
            f"its controller (slurmctld) doesn't answer: {told}; {_ping()}; ask those who run the cluster, {again}"
        )
        return ConfigError("Slurm", [problem])
    if any(sign in said.lower() for sign in NOT_OF_A_CLUSTER):
        way_out = f"name slurm.conf in SLURM_CONF, or go to a login node of the cluster, {again}"
        return ConfigError("Slurm", [f"this machine doesn't know its cluster: {told}; {way_out}"])
    return ConfigError(where, ["; ".join([f"Slurm refused {path}: {told}", *_hints(said, cluster)])])


def _ping() -> str:
    """What scontrol says of the controller, in words."""
    try:
        done = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, check=False, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return "scontrol ping and sinfo say whether it is up"
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip(" *") and not line.startswith("**")]
    return f"scontrol ping says: {', '.join(lines)}" if lines else "scontrol ping and sinfo say whether it is up"


def _hints(said: str, cluster: Cluster) -> Iterator[str]:
    """Which field of the cluster Slurm's complaint is about, and what would do."""
    if "partition" in said.lower():
        yield f"partition = {cluster.partition!r}: {_partitions()}"
    if "account" in said.lower():
        yield f"account = {cluster.account!r}: sacctmgr show associations user=$USER lists yours"
    if any(word in said.lower() for word in ("node", "cpu", "memory", "gres", "time limit")):
        names = ("nodes", "ranks_per_node", "gpus", "cpus_per_rank", "memory_per_node", "time_limit")
        asked = ", ".join(f"{name} = {getattr(cluster, name)}" for name in names)
        yield f"{asked}: sinfo --long --Node lists what the machines have"


def _partitions() -> str:
    """Those that Slurm has, in words."""
    try:
        known = subprocess.run(["sinfo", "--noheader", "--format=%R"], capture_output=True, text=True, check=False)
    except OSError:
        return "sinfo lists those there are"
    return f"Slurm has {', '.join(sorted(set(known.stdout.split()))) or 'none'}"
