"""One command of miras-launch: which runs on which machines, told and started."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace

from miras_megatron.config.errors import ConfigError
from miras_megatron.config.load import parse_command_line
from miras_megatron.config.words import counted

from .cluster import Cluster, problems_of
from .cluster_file import load_cluster
from .data_here import missing_data
from .points import points_of
from .ranks import lines_of, start_here
from .report import describe_layout, describe_memory
from .slurm import job_of
from .submit import submit

SWITCHES = {"dry-run": "prints the layout, memory a rank and the script or command; starts and writes nothing"}


def launch(words: Sequence[str], description: str) -> int:
    """Check, tell, start; the exit code. Raises ConfigError with every problem.

    description  what --help says before the options
    """
    place, rest = _places().parse_known_args(words)
    about = f"{description}\n{_places().format_help()}"
    command = parse_command_line(rest, prog="miras-launch", description=about, switches=SWITCHES)
    cluster, where = cluster_of(place)
    own = [word for word in rest if word != "--dry-run"]
    points = points_of(own, command.source, command.run, place.sweep, cluster.world_size)
    size = cluster.world_size
    told = [f"{counted(len(points), 'run')}: {', '.join(point.folder.name for point in points)}"] if place.sweep else []
    told += dict.fromkeys(describe_layout(point.run, size) for point in points)
    told += dict.fromkeys(describe_memory(point.run, size, cluster.gpu_gib) for point in points)
    problems, notes = missing_data(points, cluster)
    if problems and not command.switches["dry-run"]:
        raise ConfigError(command.source, problems)
    told += [f"note: {note}" for note in (*problems, *notes)]
    if cluster.launcher == "slurm":
        job = job_of(points, command.run, cluster, where)
        told += [f"script: {job.path}", "", job.script] if command.switches["dry-run"] else []
    else:
        told += [shlex.join(line) for point in points for line in lines_of(point, cluster, place).values()]
    print("\n".join(told), flush=True)
    if command.switches["dry-run"]:
        return 0
    return submit(job, cluster, where) if cluster.launcher == "slurm" else start_here(points, cluster, place)


def cluster_of(place: argparse.Namespace) -> tuple[Cluster, str]:
    """The cluster that the command names, with its --nodes and --ranks; without one this machine by torchrun."""
    here = Cluster(launcher="torchrun", ranks_per_node=1, doctor=False)
    cluster, where = load_cluster(place.cluster) if place.cluster else (here, "the command line")
    cluster = replace(
        cluster,
        nodes=place.nodes if place.nodes is not None else cluster.nodes,
        ranks_per_node=place.ranks if place.ranks is not None else cluster.ranks_per_node,
    )
    if problems := [*problems_of(cluster), *_wrong_places(place, cluster)]:
        raise ConfigError(where, problems)
    return cluster, where


def _wrong_places(place: argparse.Namespace, cluster: Cluster) -> Iterator[str]:
    """What is said, or isn't, of where machines meet that torchrun can't or others don't need."""
    if cluster.launcher != "torchrun":
        for name, value in (("--node-rank", place.node_rank), ("--rendezvous", place.rendezvous)):
            if value is not None:
                yield f"{name} {value}: launcher {cluster.launcher} finds its machines by itself; leave it out"
    elif cluster.nodes > 1 and place.rendezvous is None:
        yield (
            f"nodes = {cluster.nodes}: torchrun must know where they meet; start this on every machine with "
            f"--rendezvous HOST:PORT of the first and --node-rank 0 to {cluster.nodes - 1}"
        )
    if place.node_rank is not None and not 0 <= place.node_rank < cluster.nodes:
        among = counted(cluster.nodes, "node")
        yield f"--node-rank {place.node_rank}: must be from 0 to {cluster.nodes - 1}, with {among}"


def _places() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("miras-launch", add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    parser.add_argument("--cluster", metavar="NAME", help="a file of configs/clusters, or its path; none: this machine")
    parser.add_argument("--nodes", type=int, help="machines (default: the cluster's; 1 without)")
    parser.add_argument("--ranks", type=int, help="processes a machine, one a device (default the same)")
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="FIELD=a,b,c", help="a run for each; repeatable"
    )
    parser.add_argument("--node-rank", type=int, help="torchrun: which machine this is, from 0")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="torchrun: where machines meet; on the first one")
    return parser
