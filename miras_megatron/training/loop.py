"""The story of a run: build, go on from where it stood, step after step, record, evaluate, save, end politely."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from ..compat.cpu import core_without_cuda
from ..config.check import check_run, find_warnings
from ..config.schema import Run
from ..config.sizes import train_flops_per_token
from ..model.build import block_spec
from ..parallel.exit_code import tell_exit_code
from ..parallel.layout import layout_warnings
from ..parallel.mesh import ParallelMesh
from ..parallel.rendezvous import find_rank
from ..parallel.together import any_rank, gather_objects
from ..parallel.trace import chrome_trace
from .atomic_write import write_atomically
from .build_job import build_job
from .checkpoint import Progress
from .checkpoint_folder import find_checkpoint, passed_over
from .checkpoint_load import load_checkpoint, load_weights
from .device_peaks import device_peak_tflops
from .evaluate import evaluate
from .job import Job
from .metrics import StepReport
from .profile import profile_window
from .roll_back import roll_back, stopped_without_checkpoint
from .run_folder import claimed_folder, find_start
from .run_log import RunLog
from .saver import Saver
from .step import train_step
from .stop import handlers_restored, listen_for_stop
from .tokenizer import with_vocabulary
from .watchdog import watched

logger = logging.getLogger(__name__)


def train(run: Run, source: str) -> int:
    """Train the run that `source` describes to its last step, or until a signal; the exit code.

    Raises ValueError for what a user can mend, BadStep where one stops the run.
    """
    parallel = run.parallel
    with (
        handlers_restored(),
        core_without_cuda(),
        ParallelMesh(parallel, find_rank(), timeout=parallel.timeout) as mesh,
        watched(run, mesh) as watch,
    ):
        check_run(run, source, mesh.world_size)
        block_spec(run)  # what only the rule knows is refused here, before anything is written
        run = with_vocabulary(run)
        start = find_start(run)
        job = build_job(run, mesh)
        progress = begin(job, start)
        watch()  # not before: compilers, data and checkpoints may take longer than any step
        with (
            let_go(job),
            claimed(job, start),
            open_log(job, progress) as log,
            Saver(job, start, lambda path: log.say(f"saved {path}")) as saver,
            listen_for_stop(mesh.is_main) as stop,
            profile_window(run, mesh.rank) as profiled,
        ):
            tell_start(log, job, start, progress)
            while progress.step < run.training.steps:
                step = progress.step + 1
                record_trace(job, step)
                report = train_step(
                    job,
                    step,
                    look_inside=due(step, run.logging.memory_every),
                    look_at_gradients=due(step, run.logging.gradients_every),
                )
                if not saver.has_any:
                    report = stopped_without_checkpoint(report, run.checkpoint.every)
                keep_trace(job, step)
                if report.stops is not None:
                    log.event(report)
                    raise report.stops
                progress = Progress(step, progress.tokens + report.tokens)
                log.step(with_flops(report, job))
                saver.collect()
                progress = settle(job, report, progress, log, saver)
                profiled()
                last = progress.step == run.training.steps
                if progress.step == step and job.validation is not None and (last or due(step, run.evaluate.every)):
                    log.validation(step, evaluate(job, job.validation))
                asked = any_rank(mesh, stop.signal_name is not None)
                if progress.step == step and (asked or last or due(step, run.checkpoint.every)):
                    saver.save(progress)
                if asked:
                    saver.finish()
                    signal = stop.signal_name or "a signal"
                    log.say(f"stopped by {signal} after step {progress.step}; run again to go on")
                    return tell_exit_code(0)
            saver.finish()
            told = "".join(f", {count} {action.replace('_', ' ')}" for action, count in sorted(log.counts.items()))
            log.say(f"done: {progress.step} steps{told}, {progress.tokens} tokens; everything lies in {run.run.dir}")
    return 0


def settle(job: Job, report: StepReport, progress: Progress, log: RunLog, saver: Saver) -> Progress:
    """Do about a bad step what the run's policy is; where the run stands then."""
    trouble = report.trouble
    if trouble is None or trouble.action != "roll_back":
        log.event(report)
        return progress
    saver.finish()
    assert saver.last is not None, "else the step has stopped the run"
    progress = roll_back(job, report.step, saver.last)
    log.go_on_from(progress.step)
    log.event(report, back_to=progress.step)
    log.say(f"rolled back to step {progress.step} ({trouble.reason}); rows that were read since are left out")
    return progress


def record_trace(job: Job, step: int) -> None:
    """Record the coming step where it is the one to be traced."""
    if job.model.relay is not None:
        job.model.relay.recorder.on = step == job.run.logging.trace_step


def keep_trace(job: Job, step: int) -> None:
    """Write the trace of a recorded step, rank 0 for all. A collective call then."""
    if job.model.relay is None or step != job.run.logging.trace_step:
        return
    job.model.relay.recorder.on = False
    events = job.model.relay.recorder.take(job.waits)
    ranks = gather_objects(job.mesh, (job.mesh.coordinates, events))
    if job.mesh.is_main:
        path = Path(job.run.run.dir) / f"trace_step_{step}.json"
        write_atomically(path, json.dumps(chrome_trace(ranks)))


def due(step: int, every: int) -> bool:
    """Whether something that happens `every` so many steps (0: never) happens at `step`."""
    return every > 0 and step % every == 0


def begin(job: Job, start: Path | None) -> Progress:
    """Put the job where it goes on from."""
    progress = Progress()
    if start is not None:
        progress = load_checkpoint(job, start)
    elif job.run.training.init_from is not None:
        load_weights(job, find_checkpoint(job.run.training.init_from, "training.init_from"))
    return progress


@contextmanager
def let_go(job: Job) -> Iterator[None]:
    """Close the job at a clean end only: an engine waits for its device, which never comes where a rank was lost."""
    yield
    job.close()


@contextmanager
def claimed(job: Job, start: Path | None) -> Iterator[None]:
    """The run's folder, held by rank 0; touched only when all ranks stand where they go on from, `start`.

    Raises ValueError on every rank where rank 0 can't have it.
    """
    job.mesh.barrier("looking into run.dir")
    refused: list[str] = []
    with ExitStack() as held:
        if job.mesh.is_main:
            try:
                held.enter_context(claimed_folder(job.run, start))
            except ValueError as error:
                refused.append(str(error))
        for line in [line for part in gather_objects(job.mesh, refused) for line in part]:
            raise ValueError(line)
        yield


def told_data(run: Run) -> str:
    """What the run reads, in a few words."""
    names = [f"{prefix} ({weight:.3g})" if weight < 1 else prefix for weight, prefix in run.data.train_blend]
    shown = ", ".join("the text that ships with the package" if name == "shipped" else name for name in names)
    return f"{shown}; split {run.data.split}, rows of {run.data.sequence_length} tokens"


def with_flops(report: StepReport, job: Job) -> StepReport:
    """The report with the counted operations a second and their share of the device's peak."""
    tflops = train_flops_per_token(job.run) * report.tokens_per_s / job.mesh.world_size / 1e12
    peak = device_peak_tflops(job.run.logging.peak_tflops, job.run.training.precision)
    return replace(report, tflops=tflops, mfu=tflops / peak if peak is not None else None)


@contextmanager
def open_log(job: Job, progress: Progress) -> Iterator[RunLog]:
    """The run's records, closed whatever happens."""
    log = RunLog(
        Path(job.run.run.dir),
        last_step=progress.step,
        steps=job.run.training.steps,
        every=job.run.logging.every,
        tensorboard=job.run.logging.tensorboard,
        writes=job.mesh.is_main,
    )
    try:
        yield log
    finally:
        log.close()


def tell_start(log: RunLog, job: Job, start: Path | None, progress: Progress) -> None:
    """What runs, where, and from where."""
    run, mesh = job.run, job.mesh
    for warning in (*find_warnings(run), *layout_warnings(run)):
        log.say(f"note: {warning}")
    own = sum(getattr(p, "ds_numel", p.numel()) for p in job.model.parameters())  # ZeRO 3 leaves p itself empty
    log.say(
        f"{run.run.title}: {own:,} parameters a rank, {run.tokens_per_step:,} tokens a step, {mesh.world_size} rank(s) "
        f"on {mesh.device.type}, {run.training.precision}; records in {run.run.dir}"
    )
    log.say(f"reads {told_data(run)}")
    if job.layout.shares:
        log.say(job.layout.reason)
    if start is not None:
        log.say(f"goes on from {start} (step {progress.step})")
        if run.checkpoint.resume == "auto" and (later := passed_over(run.run.dir, start)):
            log.say(f"note: {later[-1]} is later, but `latest` doesn't name it; to go on from it: --resume {later[-1]}")
    elif run.training.init_from is not None:
        log.say(f"starts from the weights of {run.training.init_from}")
    if progress.step >= run.training.steps:
        log.say(f"nothing left to do: training.steps = {run.training.steps}; raise it to go on")
