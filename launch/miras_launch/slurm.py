"""A run as a job of Slurm: one script, rendered into the run's folder, then handed to sbatch."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template

from miras_megatron.config.describe import dump_run
from miras_megatron.config.errors import ConfigError
from miras_megatron.config.schema import Run

from .cluster import Cluster
from .points import Point
from .ranks import program

FOLDER = "launch"
"""Folder in a run's folder for the script and the configuration that it trains."""


class Script(Template):
    """Shell is full of $; here @@name is filled in."""

    delimiter = "@@"


@dataclass(frozen=True)
class Job:
    """A script and the files that it reads, not written yet."""

    script: str
    path: Path
    files: dict[Path, str]
    open: int
    """runs that aren't at their last step; the array of a sweep has no others"""


def job_of(points: Sequence[Point], base: Run, cluster: Cluster, where: str) -> Job:
    """The job that trains `points`, one after the other or each as a task of an array.

    base   the run whose folder holds the script: the only point's, or that of the sweep
    where  the cluster's file, for the script's first line
    """
    folder = Path(base.run.dir)
    path, listing = folder / FOLDER / "job.sbatch", folder / FOLDER / "points.txt"
    files = {config_path(point): dump_run(point.run) for point in points}
    is_sweep = points[0].folder != folder
    if is_sweep:
        files[listing] = "".join(f"{point.run.training.steps} {point.folder}\n" for point in points)
    open_points = [number for number, point in enumerate(points) if not point.finished]
    array = ",".join(map(str, open_points)) if is_sweep else None
    script = _template("job.sbatch").substitute(
        title=base.run.title,
        cluster=where,
        script=shlex.quote(str(path)),
        options="\n".join(f"#SBATCH {option}" for option in sbatch_options(base, cluster, array)),
        workdir=shlex.quote(str(Path.cwd())),
        target=_target(points[0], listing if is_sweep else None),
        setup="\n".join([*cluster.setup, *_exports(cluster)]),
        max_requeues=cluster.max_requeues,
        srun_options=shlex.join(srun_options(cluster)),
        layout=f"{cluster.nodes} x {cluster.ranks_per_node} ranks",
        preflight=_preflight(cluster),
        train=_train(cluster),
    )
    return Job(script, path, files, len(open_points))


def config_path(point: Point) -> Path:
    """The resolved configuration that a job trains: what configs/runs says later doesn't touch a queued job."""
    return point.folder / FOLDER / "config.yaml"


def sbatch_options(run: Run, cluster: Cluster, array: str | None) -> Iterator[str]:
    """The script's #SBATCH lines. array: the tasks of a sweep, such as 0,2"""
    folder = Path(run.run.dir)
    yield f"--job-name={shlex.quote(run.run.title)}"
    yield f"--nodes={cluster.nodes}"
    yield f"--ntasks-per-node={cluster.ranks_per_node}"
    if cluster.gpus:
        yield f"--gpus-per-node={cluster.gpus}"
    for name, value in {
        "cpus-per-task": cluster.cpus_per_rank,
        "mem": cluster.memory_per_node,
        "partition": cluster.partition,
        "account": cluster.account,
        "time": cluster.time_limit,
        "array": array,
    }.items():
        if value is not None:
            yield f"--{name}={value}"
    yield f"--signal=B:USR1@{cluster.signal_lead}"
    yield "--requeue"
    yield "--open-mode=append"
    log = "job_%j.log" if array is None else "job_%A_%a.log"
    yield f"--output={shlex.quote(str(folder.absolute() / 'logs' / log))}"
    yield from cluster.options


def srun_options(cluster: Cluster) -> Iterator[str]:
    """Of every step of the job; srun doesn't take --cpus-per-task over from sbatch."""
    if cluster.cpus_per_rank is not None:
        yield f"--cpus-per-task={cluster.cpus_per_rank}"
    if cluster.container is not None:
        yield f"--container-image={cluster.container}"
    if cluster.container_mounts:
        yield f"--container-mounts={','.join(cluster.container_mounts)}"
    yield from cluster.srun_options


def submit(job: Job, cluster: Cluster, where: str) -> int:
    """Write the job's files and hand the script to sbatch. Raises ConfigError where Slurm doesn't take it."""
    if not job.open:
        print(f"miras-launch: nothing left to do, {job.path.parent.parent} is at its last step already")
        return 0
    for path, text in {**job.files, job.path: job.script}.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (job.path.parent.parent / "logs").mkdir(exist_ok=True)
    number = _sbatch(job.path, cluster, where)
    print(f"submitted job {number}: {job.path}; squeue -j {number}; scancel {number}")
    return 0


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
        known = subprocess.run(["sinfo", "--noheader", "--format=%R"], capture_output=True, text=True, check=False)
        yield f"partition = {cluster.partition!r}: Slurm has {', '.join(sorted(set(known.stdout.split()))) or 'none'}"
    if "account" in said.lower():
        yield f"account = {cluster.account!r}: sacctmgr show associations user=$USER lists yours"
    if any(word in said.lower() for word in ("node", "cpu", "memory", "gres", "time limit")):
        names = ("nodes", "ranks_per_node", "gpus", "cpus_per_rank", "memory_per_node", "time_limit")
        asked = ", ".join(f"{name} = {getattr(cluster, name)}" for name in names)
        yield f"{asked}: sinfo --long --Node lists what the machines have"


def _target(point: Point, listing: Path | None) -> str:
    """The lines that say which run this task trains."""
    if listing is None:
        return f"run_dir={shlex.quote(str(point.folder))}\nsteps={point.run.training.steps}"
    return "\n".join(
        (
            "# a point of the sweep a line: its steps, its folder",
            f"mapfile -t points < {shlex.quote(str(listing))}",
            'read -r steps run_dir <<< "${points[$SLURM_ARRAY_TASK_ID]}"',
        )
    )


def _exports(cluster: Cluster) -> Iterator[str]:
    for name, value in cluster.environment.items():
        yield f"export {name}={in_double_quotes(value)}"


def in_double_quotes(value: str) -> str:
    """A word of shell in which only $NAME is filled in."""
    for sign in '\\"`':
        value = value.replace(sign, "\\" + sign)
    return f'"{value}"'


def _cache(cluster: Cluster, option: str) -> list[str]:
    return [] if cluster.cache is None else [f"{option}={in_double_quotes(cluster.cache)}"]


def _train(cluster: Cluster) -> str:
    words = [*map(shlex.quote, cluster.wrapper), shlex.quote(program(cluster, "miras-train"))]
    return " ".join([*words, f'"$run_dir/{FOLDER}/config.yaml"', *_cache(cluster, "--data.cache")])


def _preflight(cluster: Cluster) -> str:
    if not cluster.doctor:
        return "# no preflight: the cluster's file has doctor: false"
    words = [*map(shlex.quote, cluster.wrapper), shlex.quote(program(cluster, "miras-doctor"))]
    words += [f'--shared="$run_dir" --free-gib={cluster.free_gib:g}', *_cache(cluster, "--cache")]
    words += [f"--gpus={cluster.gpus}"] if cluster.gpus else []
    return _template("preflight.sh").substitute(doctor=" ".join(words)).rstrip()


def _template(name: str) -> Script:
    return Script(resources.files(__package__ or "miras_launch").joinpath("templates", name).read_text("utf-8"))
