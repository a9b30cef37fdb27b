"""Where this environment's MPI is."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path


def find_mpirun() -> str | None:
    """mpirun beside this Python, else on the PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


def mpi_is_here() -> bool:
    """Whether ranks can be started by mpirun and find each other by mpi4py."""
    return find_mpirun() is not None and importlib.util.find_spec("mpi4py") is not None
