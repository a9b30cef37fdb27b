"""What a cluster is: the fields of a file in configs/clusters, and what they must be."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from .field_rules import wrong_numbers, wrong_shell, wrong_texts


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines on which ranks are started, and how."""

    launcher: Literal["torchrun", "slurm", "mpi"] = "slurm"
    """torchrun: this machine, several with --node-rank and --rendezvous on each; slurm: sbatch and srun; mpi: mpirun"""
    nodes: int = 1
    """machines"""
    ranks_per_node: int = 8
    """processes a machine, one a device"""
    gpus_per_node: int | None = None
    """devices that a machine must have, asked of Slurm too; null = ranks_per_node, 0 = none"""
    gpu_gib: float | None = None
    """memory of a device, GiB: a run that needs more is told so; null = not known"""
    cpus_per_rank: int | None = None
    """cores a process; null = Slurm's default"""
    memory_per_node: str | None = None
    """host memory asked of Slurm, such as 500G; 0 = all of the machine's; null = Slurm's default"""
    partition: str | None = None
    """Slurm's partition; null = its default"""
    account: str | None = None
    """Slurm's account; null = its default"""
    options: list[str] = field(default_factory=list)
    """further options of sbatch, such as --qos=long or --constraint=h100"""
    srun_options: list[str] = field(default_factory=list)
    """further options of srun, such as --cpu-bind=none"""
    container: str | None = None
    """image that the ranks run in, for Slurm's plugin pyxis; null = none"""
    container_mounts: list[str] = field(default_factory=list)
    """FROM:TO folders that the image sees"""
    wrapper: list[str] = field(default_factory=list)
    """words before miras-train on every rank, such as apptainer, exec, --nv, image.sif"""
    programs: str | None = None
    """folder of miras-train on the machines; null = that of this miras-launch, with a container or a wrapper PATH"""
    mpirun: list[str] = field(default_factory=lambda: ["mpirun"])
    """words that start MPI, to which -n and the command are added; where the hosts are named"""
    setup: list[str] = field(default_factory=list)
    """lines of shell before anything else of the job, such as module load cuda"""
    environment: dict[str, str] = field(default_factory=dict)
    """variables of every rank; $NAME in a value is filled in on the machine"""
    cache: str | None = None
    """folder on each machine's own disk for data.cache; $NAME is filled in; null = as the run says"""
    time_limit: str | None = None
    """Slurm's, as [days-]hours:minutes:seconds; null = the partition's"""
    signal_lead: int = 300
    """seconds before the time limit at which the run is asked to save; two steps, two checkpoints and a validation may
    be ahead then, and must fit in"""
    max_requeues: int = 20
    """how often a job is put into the queue again, after its time or a lost rank; 0 = never"""
    doctor: bool = True
    """look at every machine with miras-doctor before training"""
    free_gib: float = 10.0
    """disk space that miras-doctor wants free for the run's folder and the cache, GiB"""

    @property
    def world_size(self) -> int:
        """Ranks of a job."""
        return self.nodes * self.ranks_per_node

    @property
    def gpus(self) -> int:
        """Devices asked of Slurm a machine."""
        return self.ranks_per_node if self.gpus_per_node is None else self.gpus_per_node


UNSET = Cluster()
"""What every field is where nobody says."""

OF_ONE_LAUNCHER = {
    "slurm": (
        *("cpus_per_rank", "memory_per_node", "partition", "account", "options", "srun_options", "container"),
        *("container_mounts", "setup", "time_limit", "signal_lead", "max_requeues"),
    ),
    "mpi": ("mpirun",),
}
"""Launcher -> the fields that it alone reads; all read the others."""


def problems_of(cluster: Cluster) -> Iterator[str]:
    """What can't be in a cluster: field, value, rule and way out, one line each."""
    yield from wrong_numbers(cluster)
    yield from _ignored(cluster)
    yield from _time(cluster)
    yield from wrong_texts(cluster)
    yield from wrong_shell(cluster)
    if cluster.container_mounts and cluster.container is None:
        yield f"container_mounts = {cluster.container_mounts}: there is no container; name its image, or leave them out"


def seconds_of(time_limit: str) -> int | None:
    """Seconds of [days-]hours:minutes:seconds; None where it isn't such."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d{1,3}):([0-5]\d):([0-5]\d)", time_limit, re.ASCII)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _ignored(cluster: Cluster) -> Iterator[str]:
    """What is set, and the launcher doesn't read."""
    for launcher, names in OF_ONE_LAUNCHER.items():
        for name in names if launcher != cluster.launcher else ():
            value = getattr(cluster, name)
            if value != getattr(UNSET, name):
                way_out = f"leave it out, or set launcher: {launcher}"
                yield f"{name} = {value!r}: launcher {cluster.launcher} doesn't read it; {way_out}"


def _time(cluster: Cluster) -> Iterator[str]:
    if cluster.time_limit is None:
        return
    limit = seconds_of(cluster.time_limit)
    if limit is None:
        yield f"time_limit = {cluster.time_limit!r}: must be [days-]hours:minutes:seconds, such as 24:00:00"
    elif limit <= cluster.signal_lead:
        yield (
            f"signal_lead = {cluster.signal_lead}: the run would be asked to save before it starts; set it below "
            f"time_limit = {cluster.time_limit}"
        )
