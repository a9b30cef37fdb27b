"""A run as a job of Slurm: one script, rendered for the run's folder; submit.py hands it to sbatch."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from miras_megatron.config.describe import dump_run
from miras_megatron.config.errors import ConfigError
from miras_megatron.config.schema import Run
from miras_megatron.config.words import counted

from .cluster import Cluster
from .points import Point
from .ranks import cache_of, program
from .shell import assignments, chosen_by, exports, in_double_quotes, names_in, template

FOLDER = "launch"
"""Folder in a run's folder for the script and the configuration that it trains."""


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
    Raises ConfigError for a name that would be lines of shell.
    """
    _refuse_lines(base, where)
    folder = Path(base.run.dir)
    path = folder / FOLDER / "job.sbatch"
    is_sweep = points[0].folder != folder
    open_points = [number for number, point in enumerate(points) if not point.finished]
    array = ",".join(map(str, open_points)) if is_sweep else None
    configs = [config_file(point) for point in points]
    script = template("job.sbatch").substitute(
        title=base.run.title,
        cluster=where,
        script=shlex.quote(str(path)),
        options="\n".join(f"#SBATCH {option}" for option in sbatch_options(base, cluster, array)),
        workdir=shlex.quote(str(Path.cwd())),
        target=_target(points, [path.name for path, _ in configs], is_sweep),
        setup="\n".join([*cluster.setup, *exports(cluster.environment)]),
        max_requeues=cluster.max_requeues,
        srun_options=shlex.join(srun_options(cluster)),
        ranks=cluster.world_size,
        layout=f"{counted(cluster.nodes, 'node')} of {counted(cluster.ranks_per_node, 'rank')}",
        unset=_unset_names(points[0], cluster, where),
        preflight=_preflight(points[0], cluster),
        train=_train(points[0], cluster),
    )
    return Job(script, path, dict(configs), len(open_points))


def _refuse_lines(run: Run, where: str) -> None:
    """Raise ConfigError for what would not stay in its line of the script."""
    named = {"run.name": run.run.name or "", "run.dir": run.run.dir, "--cluster": where, "this folder": os.getcwd()}
    problems = [
        f"{name} = {text!r}: holds a line break or another control character; choose another"
        for name, text in named.items()
        if not text.isprintable()
    ]
    if (folder := str(Path(run.run.dir))).startswith("-"):  # ./-x is -x too, as a Path
        problems.append(f"run.dir = {run.run.dir!r}: programs take it for an option; put it in a folder: runs/{folder}")
    if problems:
        raise ConfigError("launcher = 'slurm'", problems)


def config_file(point: Point) -> tuple[Path, str]:
    """The resolved configuration that a job trains, and its file: a later edit of configs/runs touches no queued job.

    It is named by its content, so launching again leaves those of queued jobs alone; and has checkpoint.resume auto,
    since a job that is queued again goes on: the script has what the user said of it.
    """
    text = dump_run(replace(point.run, checkpoint=replace(point.run.checkpoint, resume="auto")))
    return point.folder / FOLDER / f"config_{hashlib.sha256(text.encode()).hexdigest()[:8]}.yaml", text


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
    logs = str(folder.absolute() / "logs").replace("%", "%%")
    yield f"--output={shlex.quote(os.path.join(logs, log))}"
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


def _target(points: Sequence[Point], configs: Sequence[str], is_sweep: bool) -> str:
    """The lines that say which run this task trains; Slurm keeps the script, so no file can change beneath it.

    configs  the name of each point's configuration
    """
    lines = [
        assignments(
            {
                "steps": point.run.training.steps,
                "run_dir": point.folder,
                "config": config,
                "resume": point.run.checkpoint.resume,
            }
        )
        for point, config in zip(points, configs, strict=True)
    ]
    return chosen_by("SLURM_ARRAY_TASK_ID", lines) if is_sweep else lines[0]


def _cache(point: Point, cluster: Cluster, option: str) -> list[str]:
    own, cache = cache_of(point, cluster)
    if cache is None or (own and option == "--data.cache"):  # the configuration has the user's
        return []
    return [f"{option}={shlex.quote(cache) if own else in_double_quotes(cache)}"]


def _unset_names(point: Point, cluster: Cluster, where: str) -> str:
    """The lines that end the job with a word where the cluster's cache names what isn't set: bash would have none."""
    own, cache = cache_of(point, cluster)
    names = [] if own or cache is None else names_in(cache)
    if not names:
        return "# no variable is filled in: the cluster's file names none in cache"
    told = shlex.quote(f"cache = {cache!r} in {where}:")
    way_out = shlex.quote("isn't set on this machine; set it in environment or setup there, or name another folder")
    return f"""for name in {" ".join(names)}; do
  [ -n "${{!name+set}}" ] || {{ say {told} "\\$$name" {way_out}; exit 2; }}
done"""


def _train(point: Point, cluster: Cluster) -> str:
    words = [*map(shlex.quote, cluster.wrapper), shlex.quote(program(cluster, "miras-train"))]
    words += [f'"$run_dir/{FOLDER}/$config" --checkpoint.resume="$resume"', *_cache(point, cluster, "--data.cache")]
    return " ".join(words)


def _preflight(point: Point, cluster: Cluster) -> str:
    if not cluster.doctor:
        return "# no preflight: the cluster's file has doctor: false"
    words = [*map(shlex.quote, cluster.wrapper), shlex.quote(program(cluster, "miras-doctor"))]
    words += [f'--shared="$run_dir" --free-gib={cluster.free_gib:g}', *_cache(point, cluster, "--cache")]
    words += [f"--gpus={cluster.gpus}"] if cluster.gpus else []
    return template("preflight.sh").substitute(doctor=" ".join(words)).rstrip()
