"""What every test stands on: one thread, fixed seeds, no trace of the machine."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator

import pytest
import torch
from helpers.mpi import mpi_is_here
from helpers.worlds import drop_old_groups

from miras_megatron.memory.fused_lanes import KERNELS

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(20250113)


@pytest.fixture(autouse=True)
def _nothing_left_over() -> Iterator[None]:
    yield
    KERNELS.clear()
    drop_old_groups()


@pytest.fixture(autouse=True)
def _no_rank_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test decides itself which rank it is, also where the tests were started by a launcher."""
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name in [n for n in os.environ if n.startswith("SLURM_")]:
        monkeypatch.delenv(name)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests for devices, or other interpreters, that are not here are left out and counted, not skipped."""
    kept, left_out = [], []
    here = {
        "lm_eval": "MIRAS_LM_EVAL_PYTHON" in os.environ,
        "slurm": "MIRAS_TEST_SLURM" in os.environ,
        "mpi": mpi_is_here(),
    }
    devices = torch.cuda.device_count()
    for item in items:
        several = item.get_closest_marker("multi_gpu")
        needs = (*several.args, 2)[0] if several else 1 if item.get_closest_marker("gpu") else 0
        lacking = any(item.get_closest_marker(mark) and not is_here for mark, is_here in here.items())
        (kept if devices >= needs and not lacking else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
