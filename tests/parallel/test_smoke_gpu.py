"""`make smoke-gpu`: layouts in small on CUDA and NCCL against one process on the CPU, for whoever has a GPU."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.layouts import Case, compare_layout, reference
from helpers.worlds import run_world

ONE: dict[str, dict[str, Any]] = {
    "whole": {},
    "pieces": {"pieces": 3},
    "states in host memory": {"pieces": 3, "keep_states": "host"},
}
MANY: dict[str, dict[str, Any]] = {
    "relay": {"context": 2},
    "relay in pieces": {"context": 2, "pieces": 3},
    "relay in head groups": {"context": 2, "pieces": 2, "head_groups": 2},
    "heads": {"context": 2, "carry": "heads"},
    "tensor and sequence": {"tensor": 2, "sequence": True, "pieces": 2},
    "pipeline": {"pipeline": 2, "pieces": 2},
    "relay of four": {"context": 4, "pieces": 2},
    "all axes": {"tensor": 2, "context": 2, "pieces": 2},
}


def ranks_of(layout: dict[str, Any]) -> int:
    """GPUs that a layout takes."""
    return Case("", {}, layout, 0).ranks


def check(pattern: str, layout: dict[str, Any], backend: str) -> None:
    """float64 on the device too; its sums go in another order."""
    stages = layout.get("pipeline", 1)
    case = Case(pattern, {"heads": 4, "tie_embeddings": stages == 1}, layout, 48, "after", count=stages)
    expected = reference(case)
    for rank, differences in enumerate(run_world(case.ranks, compare_layout, case, expected, backend=backend)):
        worst = max(differences, key=differences.__getitem__)
        assert differences[worst] < 1e-9, f"rank {rank}: {worst}: {differences[worst]:.1e}"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ONE)
def test_one_gpu_computes_what_the_cpu_does(name: str) -> None:
    """Tensors left on the host, or a replay from another device, show here."""
    check("mcgw", ONE[name], "nccl")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.multi_gpu(ranks_of(MANY[name]))) for name in MANY]
)
def test_gpus_that_share_a_row_compute_what_one_process_does(name: str) -> None:
    """NCCL runs a communicator's operations in order of issue: a wrong order hangs, and the deadline names it."""
    layout = MANY[name]
    check("mw" if layout.get("carry") == "heads" or "head_groups" in layout else "mcgw", layout, "nccl")


@pytest.mark.parametrize("name", ["relay in head groups", "pipeline"])
def test_the_smoke_test_itself_on_this_machine(name: str) -> None:
    """The same functions over gloo, so that the command works when somebody has a GPU."""
    check("mw", MANY[name], "gloo")
