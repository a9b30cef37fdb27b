"""What is refused of a scan's tensors before anybody looks at their shapes: no tensor, no number, another device."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .state import MemoryState

GATES = ("log_keep", "momentum", "lr", "delta", "lr_prev", "window")
LAYERED = ("log_keep", "momentum", "lr", "lr_prev")
"""gates that may be a tuple, one tensor a matrix"""
STATE_DTYPES = (torch.float32, torch.float64)


def tensor_problems(params: Mapping[str, Any], inputs: Mapping[str, Any], state: MemoryState) -> Iterator[str]:
    """Everything that isn't a tensor of floating point numbers on q's device; counts are looked at elsewhere.

    inputs  q and, for a scan, all other fields of MemoryInputs
    A kernel for CPUs takes addresses: another device's would be read as if they were of its own memory.
    """
    wanted = getattr(inputs["q"], "device", None)
    for name, x in _named(params, inputs, state):
        if not isinstance(x, Tensor):
            among = ", or a tuple with one a matrix" if name in LAYERED else ""
            yield f"{name} = {reprlib.repr(x)}: must be a tensor{among}"
        elif not x.is_floating_point():
            yield f"{name} is {x.dtype}: must be of floating point numbers"
        elif name.startswith("state") and x.dtype not in STATE_DTYPES:
            yield f"{name} is {x.dtype}: must be float32 or float64; make the state with init_state"
        elif wanted is not None and x.device != wanted:
            yield f"{name} is on {x.device}: q is on {wanted}; move both to one device"


def _named(params: Mapping[str, Any], inputs: Mapping[str, Any], state: MemoryState) -> Iterator[tuple[str, Any]]:
    """Everything that a scan computes with, named as errors name it."""
    for name, given in inputs.items():
        if name in LAYERED and isinstance(given, (tuple, list)):
            yield from ((f"{name} of matrix {i}", x) for i, x in enumerate(given))
        elif given is not None or name not in GATES:
            yield name, given
    yield from ((f"params[{name!r}]", x) for name, x in params.items())
    yield from ((f"state: {name}", x) for name, x in state.tensors().items() if name not in ("phase", "seen"))


def count_problems(name: str, count: Any, batch: int, most: int | None, limit: str) -> Iterator[str]:
    """A state's count of tokens, one a row: int64 [B] from 0 to `most`, which `limit` explains."""
    if not isinstance(count, Tensor):
        yield f"state: {name} = {reprlib.repr(count)}: must be an int64 tensor [{batch}], one number a row"
    elif count.dtype != torch.int64 or tuple(count.shape) != (batch,):
        yield f"state: {name} is {count.dtype} {tuple(count.shape)}: must be int64 ({batch},), one number a row"
    elif batch and int(count.min()) < 0:
        yield f"state: {name} = {reprlib.repr(count.tolist())}: counts tokens, so none is below 0"
    elif batch and most is not None and int(count.max()) > most:
        yield f"state: {limit.format(int(count.max()))}"
