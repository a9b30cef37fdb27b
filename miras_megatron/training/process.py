"""What a run sets for its whole process on a CPU: the kernel of memory scans, and the C library's heap.

Also what a model that doesn't fit into memory looks like."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

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


TOO_LARGE = ("can't allocate", "out of memory", "overflow")
"""What torch says of a tensor that doesn't fit: a host's allocator, CUDA's, and sizes beyond 64 bits."""


@contextmanager
def told_where_memory_is_short() -> Iterator[None]:
    """Inside, a model that this rank's memory doesn't hold is one ValueError."""
    try:
        yield
    except (RuntimeError, MemoryError, TypeError) as error:
        lines = [line for line in str(error).splitlines() if any(sign in line.lower() for sign in TOO_LARGE)]
        if not lines and not isinstance(error, MemoryError):
            raise
        raise ValueError(
            f"the model doesn't fit into this rank's memory ({(lines or ['MemoryError'])[0]}); miras-train CONFIG "
            f"--dry-run says how much it needs; take a smaller one (model.*), or share it (parallel.tensor, .pipeline)"
        ) from None
