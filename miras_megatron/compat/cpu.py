"""A scope in which megatron-core runs without CUDA; where CUDA is, it does nothing.

megatron-core names the CUDA device in three ways: `torch.cuda` functions, `device="cuda"` literals and
the type string of a tensor. Inside the scope torch answers all three for the CPU. Patched are names of
torch, never megatron's code; the one thing set in megatron is its random-number tracker, a variable made
to be set. Everything is put back when the scope ends.

Functions are replaced rather than watched by a `TorchFunctionMode`: the mode costs 2 microseconds for
every torch call of a step, which is as much as a small operation takes on a CPU.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

CPU = torch.device("cpu")

FACTORIES = (
    *("tensor", "as_tensor", "empty", "zeros", "ones", "full", "arange", "rand", "randn", "eye"),
    *("empty_like", "zeros_like", "ones_like", "full_like"),
)
"""Functions of torch that take `device=` or `pin_memory=`, as megatron-core calls them."""


@contextlib.contextmanager
def core_without_cuda() -> Iterator[None]:
    """Let megatron-core run on the CPU until the `with` ends. A no-op with CUDA, and inside itself.

    Inside: factories of torch take `device="cuda"` (or a CUDA device or index) for the CPU and ignore
    `pin_memory`; `Tensor.cuda()` and `.pin_memory()` return the tensor; `Tensor.type()` says
    "torch.cuda.FloatTensor" for a CPU tensor, since core's optimizers compare with that; `torch.cuda`
    answers for streams, synchronisation and the current device; core's tracker of random states keeps CPU states.
    """
    if torch.cuda.is_available() or _inside():
        yield
        return
    from megatron.core.tensor_parallel import random as core_random

    with contextlib.ExitStack() as undo:
        for name in FACTORIES:
            _replace(undo, torch, name, _on_cpu(getattr(torch, name)))
        for name, answer in _cuda_answers().items():
            _replace(undo, torch.cuda, name, answer)
        for name, method in _tensor_methods().items():
            _replace(undo, torch.Tensor, name, method)
        _replace(undo, core_random, "_CUDA_RNG_STATE_TRACKER", _cpu_tracker())
        _replace(undo, core_random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True)
        yield


def _inside() -> bool:
    return hasattr(torch.zeros, "_miras_original")


def _replace(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set `owner.name`; on exit put back what was there, or take it away where it was inherited."""
    here = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    undo.callback(setattr, owner, name, before) if here else undo.callback(delattr, owner, name)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """`factory`, with a CUDA device read as the CPU and pinned memory as plain memory."""

    @functools.wraps(factory)
    def make(*args: Any, **options: Any) -> Any:
        if "device" in options and _names_cuda(options["device"]):
            options["device"] = CPU
        options.pop("pin_memory", None)
        return factory(*args, **options)

    make._miras_original = factory  # type: ignore[attr-defined]
    return make


def _names_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int)


def _cuda_answers() -> dict[str, Any]:
    """Name in torch.cuda -> what it is without CUDA."""
    return {
        "current_device": lambda: CPU,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "manual_seed": lambda seed: None,
        "current_stream": lambda device=None: _Now(),
        "default_stream": lambda device=None: _Now(),
    }


class _Now:
    """A stream on which everything has already happened: CPU calls return when they are done."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing is under way on any stream."""

    def wait_event(self, event: Any) -> None:
        """Nothing is under way on any stream."""

    def synchronize(self) -> None:
        """Nothing is under way on any stream."""


def _tensor_methods() -> dict[str, Callable[..., Any]]:
    plain_type = torch.Tensor.type

    def cuda(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return self

    def pin_memory(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return self

    def type_of(self: torch.Tensor, dtype: Any = None, **options: Any) -> Any:
        if dtype is not None:
            return plain_type(self, dtype, **options)
        return plain_type(self).replace("torch.", "torch.cuda.", 1)

    return {"cuda": cuda, "pin_memory": pin_memory, "type": type_of}


def _cpu_tracker() -> Any:
    """Core's tracker of named random states, over the CPU generator. Used for dropout under sequence parallelism."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    class CpuStatesTracker(CudaRNGStatesTracker):  # type: ignore[misc, unused-ignore]
        def add(self, name: str, seed: int) -> None:
            self._is_initialized = True
            self.states_[name] = torch.Generator().manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
            if name not in self.states_:
                raise ValueError(f"random state {name!r} was never added; call ParallelMesh.seed first")
            before = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(before)

    return CpuStatesTracker()
