"""Fused kernels; imports without a GPU and without a compiler.

KERNELS: names and callables with the reference's signature, for devices; none is registered yet, and
`miras_megatron.layers.backends` then picks the reference scan. Beneath that, `cpu_build` has the walk of its tiles for
CPUs.
"""

from collections.abc import Callable
from typing import Any

KERNELS: dict[str, Callable[..., Any]] = {}
