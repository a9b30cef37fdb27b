"""Fused kernels, as names and callables with the reference's signature; imports without a GPU.

No kernel is registered yet: `miras_megatron.layers.backends` then picks the reference scan.
"""

from collections.abc import Callable
from typing import Any

KERNELS: dict[str, Callable[..., Any]] = {}
