"""Training on several ranks of this machine, and the proof that they do what one rank does.

Before the ranks start, one rank alone takes the first steps of the same run; losses must agree to a bound.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from ..config.describe import dump_run
from ..config.schema import Parallel, Run
from .atomic_write import write_atomically
from .main import run_training

FIRST_STEPS = 4
"""steps that one rank takes as well"""

LOSS_BOUND = 2e-5
"""largest relative difference of those steps' losses: float32 sums over ranks in another order, a few steps apart"""


def train_on_local_ranks(run: Run, source: str) -> int:
    """Train `run` on as many processes of this machine as it shares its rows, layers and heads by; the exit code.

    Raises ValueError where the first losses aren't those of one rank.
    """
    ranks = run.parallel.model_ranks
    if ranks == 1:
        return run_training(run, source)
    alone = Path(run.run.dir) / "one_rank"
    count = min(FIRST_STEPS, run.training.steps)
    if len(first_losses(alone)) < count:
        print(f"one rank alone takes the first {count} steps, to compare ..", flush=True)
        code = run_training(first_steps(run, alone), source)
        if code != 0:
            return code
    print(f"\n{ranks} ranks share every row (parallel.context = {run.parallel.context}):", flush=True)
    code = _launch(run, ranks)
    if code == 0:
        print(compare_first(Path(run.run.dir), alone), flush=True)
    return code


def first_steps(run: Run, folder: Path) -> Run:
    """The first steps of `run` on one rank, in a folder of its own; learning rates are those of the whole run."""
    optimizer = replace(run.optimizer, decay_steps=run.optimizer.decay_steps or run.training.steps)
    if optimizer.schedule == "wsd":
        optimizer = replace(optimizer, schedule="constant", decay_steps=None)  # level until its last steps
    return replace(
        run,
        run=replace(run.run, dir=str(folder)),
        parallel=Parallel(),
        data=replace(run.data, cache=run.data.cache or str(Path(run.run.dir) / "cache")),
        training=replace(run.training, steps=min(FIRST_STEPS, run.training.steps)),
        optimizer=optimizer,
        checkpoint=replace(run.checkpoint, every=0),
        evaluate=replace(run.evaluate, every=0, batches=1),
        logging=replace(run.logging, every=1, tensorboard=False),
    )


def first_losses(folder: Path) -> list[float]:
    """Losses of the first steps that a run recorded."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()[:FIRST_STEPS]
    return [json.loads(line)["loss"] for line in lines]


def compare_first(folder: Path, alone: Path) -> str:
    """One line that says how far the losses are apart. Raises ValueError beyond LOSS_BOUND."""
    pairs = list(zip(first_losses(folder), first_losses(alone), strict=True))
    apart = [abs(many - one) / abs(one) for many, one in pairs]
    worst = next((x for x in apart if x != x), max(apart))
    if not worst <= LOSS_BOUND:  # not a number is no agreement either
        shown = ", ".join(f"{many:.6f} / {one:.6f}" for many, one in pairs)
        raise ValueError(
            f"{folder}: the first {len(pairs)} losses of several ranks and of one differ by {worst:.1e}, more than "
            f"{LOSS_BOUND:.0e}: {shown}; this run has not trained the model it should have, please report it"
        )
    return f"the first {len(pairs)} losses are those of one rank to {worst:.0e} (bound {LOSS_BOUND:.0e})"


def _launch(run: Run, ranks: int) -> int:
    """torchrun on this machine; ranks share its cores."""
    config = Path(run.run.dir) / "several_ranks.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(config, dump_run(run))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    threads = str(max((os.cpu_count() or 1) // ranks, 1))
    quiet = {"OMP_NUM_THREADS": threads, "PYTHONWARNINGS": "ignore"}
    command = [*launcher, "-m", "miras_megatron.training.main", str(config)]
    return subprocess.run(command, env=os.environ | quiet, check=False).returncode
