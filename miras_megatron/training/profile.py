"""A window of torch.profiler over a few steps, switched by the configuration; the trace opens in a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from ..config.schema import Run


@contextmanager
def profile_window(run: Run, rank: int) -> Iterator[Callable[[], None]]:
    """Yields what to call after every step. The trace of the window lies in RUN/profile/rank0.json.gz and on."""
    if not run.logging.profile:
        yield lambda: None
        return
    folder = Path(run.run.dir) / "profile"
    folder.mkdir(parents=True, exist_ok=True)
    wait = max(run.logging.profile_start - 2, 0)
    warm = min(run.logging.profile_start - 1, 1) if run.logging.profile_start > 0 else 0
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    with profile(
        activities=activities,
        schedule=schedule(wait=wait, warmup=warm, active=run.logging.profile_steps, repeat=1),
        on_trace_ready=lambda p: p.export_chrome_trace(str(folder / f"rank{rank}.json.gz")),
        record_shapes=True,
    ) as profiler:
        yield profiler.step
