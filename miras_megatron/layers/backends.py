"""Which function walks a memory: the reference in plain torch, or a fused one with the same signature.

Beneath the reference, its hand-written scan has a kernel for CPUs, compiled where a run first asks for it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..memory import MemoryState, Rule, scan_memory
from ..memory.fused_lanes import KERNELS

Scan = Callable[..., tuple[Tensor, MemoryState]]
"""scan(rule, params, inputs, state, *, chunk_size, cu_seqlens, checkpoint_every) -> (reads, state)"""

BACKENDS: dict[tuple[str, str], Scan] = {}
"""(rule name, backend) -> scan; a fused kernel is one line here. The reference serves every rule."""


def pick_scan(rule: Rule, prefer: str = "reference", device: torch.device | str = "cpu") -> Scan:
    """The scan for `rule` on `device`: the preferred backend's where it has one, else the reference.

    Raises ValueError for an unknown backend.
    """
    known = {"reference"} | {backend for _, backend in BACKENDS}
    if prefer not in known:
        raise ValueError(f"backend = {prefer!r}: unknown; the backends are {', '.join(sorted(known))}")
    if torch.device(device).type == "cpu":
        return scan_memory
    return BACKENDS.get((rule.name, prefer), scan_memory)


def use_cpu_kernel(wanted: bool = True) -> str:
    """Give this process's hand-written scans on CPUs the compiled kernel, or none; returns why not, "" if they have it.

    Without it they go on with torch's operations, which compute the same.
    """
    KERNELS.pop("cpu", None)
    if not wanted:
        return "not wanted"
    try:
        from miras_kernels.cpu_build import NoKernel, load_cpu_scan
        from miras_kernels.cpu_scan import MOST_THREADS
    except ImportError:  # exports ship this file without the kernels
        return "miras_kernels is not installed"
    if (threads := torch.get_num_threads()) > MOST_THREADS:
        return f"it is for at most {MOST_THREADS} threads, here are {threads}; set OMP_NUM_THREADS"
    try:
        KERNELS["cpu"] = load_cpu_scan()
    except NoKernel as reason:
        return str(reason)
    return ""
