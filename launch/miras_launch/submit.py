"""A rendered job's files written, and its script handed to sbatch; what Slurm says against it, told by field."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

from miras_megatron.config.errors import ConfigError

from .cluster import Cluster
from .slurm import Job


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
        lines = [
            line.removeprefix("sbatch: error: ").removeprefix("sbatch: fatal: ") for line in done.stderr.splitlines()
        ]
        raise ConfigError(
            where, ["; ".join([f"Slurm refused {path}: {', '.join(lines)}", *_hints(done.stderr, cluster)])]
        )
    return done.stdout.strip().partition(";")[0]


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
