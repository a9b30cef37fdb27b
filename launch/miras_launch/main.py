"""miras-launch CONFIG [--cluster NAME] [--nodes N] [--ranks N] [--sweep field=a,b,c ..] [--section.field=value ..]

Check a run for the ranks of a cluster, then start them: by torchrun on this machine (without --cluster), by Slurm's
sbatch, or by mpirun. What every rank would find out (a layout that does not divide, a batch that does not split) is
said here once, before a process starts; it needs no torch, so a login node will do. docs/launch.md tells the rest.

--dry-run prints layout, memory a rank and the script or command. Exit codes: 0 submitted, or trained; 2 something to
mend in configuration, cluster file, data or what Slurm was asked for; 3 stopped by the number guard; 6 the preflight
found machines at fault; else that of torchrun (1 whatever happened) or mpirun.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from miras_megatron.config.errors import ConfigError
from miras_megatron.config.load import parse_command_line

from .cluster import Cluster, load_cluster, problems_of
from .points import points_of
from .ranks import lines_of, start_here
from .report import describe_layout, describe_memory
from .slurm import job_of, submit

SWITCHES = {"dry-run": "prints the layout, memory a rank and the script or command; starts and writes nothing"}


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see above for what it returns."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return launch(words)
    except ConfigError as error:
        print(f"miras-launch: {error}", file=sys.stderr)
        return 2


def launch(words: Sequence[str]) -> int:
    """Check, tell, start. Raises ConfigError with every problem."""
    place, rest = _places().parse_known_args(words)
    about = f"{__doc__}\n{_places().format_help()}"
    command = parse_command_line(rest, prog="miras-launch", description=about, switches=SWITCHES)
    cluster, where = cluster_of(place)
    own = [word for word in rest if word != "--dry-run"]
    points = points_of(own, command.source, command.run, place.sweep, cluster.world_size)
    size = cluster.world_size
    told = [f"{len(points)} runs: {', '.join(point.folder.name for point in points)}"] if place.sweep else []
    told += dict.fromkeys(describe_layout(point.run, size) for point in points)
    told += dict.fromkeys(describe_memory(point.run, size, cluster.gpu_gib) for point in points)
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
        yield f"--node-rank {place.node_rank}: must be from 0 to {cluster.nodes - 1}, with {cluster.nodes} nodes"


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


if __name__ == "__main__":
    sys.exit(main())
