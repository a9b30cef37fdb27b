"""What a run sets for its whole process on a CPU: the kernel of memory scans, and the C library's heap."""

from __future__ import annotations

import logging

from ..compat.heap import give_back_large_blocks
from ..config.schema import Run
from ..layers.backends import use_cpu_kernel
from ..parallel.mesh import ParallelMesh

logger = logging.getLogger(__name__)


def settle_process(run: Run, mesh: ParallelMesh) -> None:
    """training.cpu_kernel and training.compact_heap; a rank that goes without the kernel says why."""
    on_cpu = mesh.device.type == "cpu"
    wanted = run.training.cpu_kernel and on_cpu
    if (reason := use_cpu_kernel(wanted)) and wanted:
        logger.warning("training.cpu_kernel: memories are walked by torch's operations: %s", reason)
    elif wanted and mesh.is_main:
        logger.info("memories are walked by the kernel compiled for this CPU, where it has their rule")
    if run.training.compact_heap and not (on_cpu and give_back_large_blocks()) and mesh.is_main:
        logger.warning("training.compact_heap = true: no effect, it is for a CPU and the C library glibc")
