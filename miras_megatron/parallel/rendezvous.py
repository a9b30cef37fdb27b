"""Who am I, and where do we meet: torchrun's variables, else SLURM's or MPI's, else a process of its own.

The only file that reads the environment, and the only one that knows mpi4py (imported when it is needed).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MPI_SIGNS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""One of these is set by an MPI launcher."""


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """One process among `world_size`."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """index among the processes of this machine: which GPU it takes"""
    local_size: int = 1
    """processes on this machine"""
    host: str = "127.0.0.1"
    """name or address of the machine of rank 0"""
    port: int = 0
    """where rank 0 (or torchrun's agent) keeps the store in which ranks find each other; 0 = nobody to find"""
    launcher: str = "none"
    """torchrun, slurm, mpi or none"""
    agent_keeps_store: bool = False
    """torchrun's agent serves the store already, so rank 0 must not"""
    attempt: int = 0
    """how often torchrun has restarted the group; keeps attempts apart in the store"""


def find_rank(environment: Mapping[str, str] | None = None) -> RankInfo:
    """The RankInfo of this process, from `environment` (default: the process's own).

    Raises ValueError that names the variables that are missing or wrong.
    """
    env = os.environ if environment is None else environment
    if "RANK" in env:
        return _from_torchrun(env)
    # Inside a job of Slurm mpirun's ranks also have the variables of the one task a node that starts them.
    by_mpirun = "OMPI_COMM_WORLD_SIZE" in env
    if "SLURM_STEP_ID" in env and "SLURM_PROCID" in env and not by_mpirun:
        return _from_slurm(env)
    if any(sign in env for sign in MPI_SIGNS):
        return _from_mpi(env)
    return RankInfo()


def _from_torchrun(env: Mapping[str, str]) -> RankInfo:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in env]
    if missing:
        raise ValueError(
            f"RANK is set but {', '.join(missing)} is not: start with torchrun, or set all of {', '.join(names)}"
        )
    world_size = _number(env, "WORLD_SIZE")
    return _checked(
        RankInfo(
            rank=_number(env, "RANK"),
            world_size=world_size,
            local_rank=_number(env, "LOCAL_RANK"),
            local_size=_number(env, "LOCAL_WORLD_SIZE", world_size),
            host=env["MASTER_ADDR"],
            port=_number(env, "MASTER_PORT"),
            launcher="torchrun",
            agent_keeps_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=_number(env, "TORCHELASTIC_RESTART_COUNT", 0),
        )
    )


def _from_slurm(env: Mapping[str, str]) -> RankInfo:
    """A task of `srun`. A batch script's own process is no task: it has a rank but no step."""
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", ""))
    world_size = _number(env, size_name)
    if world_size > 1 and not nodes:
        raise ValueError("SLURM_STEP_NODELIST is not set: start with srun, which sets it")
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", str(world_size)))
    return _checked(
        RankInfo(
            rank=_number(env, "SLURM_PROCID"),
            world_size=world_size,
            local_rank=_number(env, "SLURM_LOCALID"),
            local_size=_tasks_here(tasks, _number(env, "SLURM_NODEID", 0)),
            host=env.get("MASTER_ADDR") or first_host(nodes) or "127.0.0.1",
            port=_number(env, "MASTER_PORT", _port_of_job(env)),
            launcher="slurm",
        )
    )


def _port_of_job(env: Mapping[str, str]) -> int:
    """A port every task derives alike: from the job and the step, so that two steps on a machine do not meet."""
    return 20_000 + (17 * _number(env, "SLURM_JOB_ID", 0) + _number(env, "SLURM_STEP_ID", 0)) % 20_000


def first_host(nodes: str) -> str:
    """The first name of a SLURM node list: "gpu[003-007,12],login" -> "gpu003"."""
    match = re.match(r"([^,\[]*)(?:\[([^\],-]*)[^\]]*\]([^,\[]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else ""


def _tasks_here(tasks: str, node: int) -> int:
    """Tasks on node number `node` from SLURM's short form: "4(x2),3" says 4, 4, 3."""
    counts: list[int] = []
    for part in tasks.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"SLURM_TASKS_PER_NODE = {tasks!r}: must look like 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[min(node, len(counts) - 1)]


def _from_mpi(env: Mapping[str, str]) -> RankInfo:
    """A process of mpirun; rank 0 tells the others its name and a free port."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ValueError("started by MPI but mpi4py is missing: pip install mpi4py, or start with torchrun") from error
    world: Any = MPI.COMM_WORLD
    local: Any = world.Split_type(MPI.COMM_TYPE_SHARED)
    meeting = world.bcast(_meeting_place(env) if world.Get_rank() == 0 else None, root=0)
    return RankInfo(
        rank=world.Get_rank(),
        world_size=world.Get_size(),
        local_rank=local.Get_rank(),
        local_size=local.Get_size(),
        host=meeting[0],
        port=meeting[1],
        launcher="mpi",
    )


def _meeting_place(env: Mapping[str, str]) -> tuple[str, int]:
    import socket

    with socket.socket() as probe:
        probe.bind(("", 0))
        free = probe.getsockname()[1]
    return env.get("MASTER_ADDR") or socket.gethostname(), _number(env, "MASTER_PORT", free)


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None:
        if default is None:
            raise ValueError(f"{name} is not set, though its launcher sets it: start with torchrun, srun or mpirun")
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} = {text!r}: must be a whole number") from None


def _checked(info: RankInfo) -> RankInfo:
    if not 0 <= info.rank < info.world_size:
        raise ValueError(f"rank {info.rank} of {info.world_size} ({info.launcher}): must be below the number of ranks")
    return info
