"""What the numbers and texts of a cluster's file must be for Slurm, bash and the machines to take them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

from .shell import syntax_fault

if TYPE_CHECKING:
    from .cluster import Cluster

ABOVE_0 = ("nodes", "ranks_per_node", "gpu_gib", "cpus_per_rank", "signal_lead")
FROM_0 = ("gpus_per_node", "max_requeues", "free_gib")

MOST = {
    "nodes": 1_000_000,
    "ranks_per_node": 1_000_000,
    "signal_lead": 65_535,  # Slurm's own bound
    "gpu_gib": 1e9,
    "free_gib": 1e9,
}
"""Field -> the greatest value; .nan isn't below it either."""


def wrong_numbers(cluster: Cluster) -> Iterator[str]:
    """Field, value and rule of each number that can't be, one line each."""
    for name in (*ABOVE_0, *FROM_0):
        value = getattr(cluster, name)
        if value is None:
            continue
        if value < 0 or (value == 0 and name in ABOVE_0):
            yield f"{name} = {value}: must be {'above' if name in ABOVE_0 else 'at least'} 0"
        elif name in MOST and not value <= MOST[name]:
            yield f"{name} = {value}: must be a number up to {MOST[name]:,.0f}"


def wrong_texts(cluster: Cluster) -> Iterator[str]:
    """What would break the lines of a script, or the words of a command."""
    for field in fields(cluster):
        if _has_nul(value := getattr(cluster, field.name)):
            yield f"{field.name} = {value!r}: holds a NUL byte, which no program takes; leave it out"
    for name in cluster.environment:
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            yield f"environment.{name}: no name of a variable; letters (A to z), digits and _ only"
    for name in ("options", "srun_options"):
        for word in getattr(cluster, name):
            if not word.startswith("-") or "\n" in word or "\r" in word:
                yield f"{name}: {word!r} is no option; each is one line and starts with -, its value after ="
    for name in ("partition", "account", "memory_per_node"):
        if (value := getattr(cluster, name)) is not None and not re.fullmatch(r"[\w.,:+-]+", value):
            yield f"{name} = {value!r}: must be one word, or null"
    if cluster.launcher == "mpi" and not (cluster.mpirun and all(word.strip() for word in cluster.mpirun)):
        yield f"mpirun = {cluster.mpirun}: must hold the command that starts MPI, such as mpirun, and no empty word"


def wrong_shell(cluster: Cluster) -> Iterator[str]:
    """Lines of shell that don't end what they open: they would take the rest of a job's script with them."""
    if cluster.setup and (fault := syntax_fault(cluster.setup)):
        yield f"setup = {cluster.setup}: is no whole shell: {fault}; lines are counted within setup; mend it"


def _has_nul(value: object) -> bool:
    """Whether a text holds a NUL byte, or one of the texts in a list or under a name."""
    texts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return any(isinstance(text, str) and "\0" in text for text in texts)
