"""What a run sets for its whole process on a CPU: the kernel of memory scans, and the C library's heap."""

from __future__ import annotations

import logging

from ..compat.heap import give_back_large_blocks
from ..config.schema import Run
from ..layers.backends import use_cpu_kernel
from ..parallel.mesh import ParallelMesh

logger = logging.getLogger(__name__)


def settle_process(run: Run, mesh: ParallelMesh) -> None:
    """training.cpu_kernel and training.compact_heap; rank 0 says what came of them."""
    log, warn = (logger.info, logger.warning) if mesh.is_main else (logger.debug, logger.debug)
    on_cpu = mesh.device.type == "cpu"
    walked_by = use_cpu_kernel(run.training.cpu_kernel and on_cpu)
    if on_cpu:
        log("memory scans on the CPU: %s", walked_by)
    if run.training.compact_heap and not (on_cpu and give_back_large_blocks()):
        warn("training.compact_heap = true: no effect, it is for a CPU and the C library glibc")
