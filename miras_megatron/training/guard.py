"""The guard against numbers that are none: finds the first layer and quantity that went wrong, before the update.

The step is checked after the gradients are summed over ranks and before the optimizer acts, so weights are never
poisoned. Only then, on the failing step, the same microbatches are run again with hooks: nothing is paid before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


class BadStep(Exception):
    """A step went wrong, and the run's policy is to stop."""


class NotANumber(BadStep):
    """A loss or gradient was infinite or no number."""


@dataclass
class Finding:
    """What went wrong first on this rank: the module and what of it; empty where nothing did here."""

    place: str = ""
    quantity: str = ""
    details: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        text = f"{self.quantity} of {self.place}" if self.place else "nothing on this rank"
        return text + ("".join(f"\n  {line}" for line in self.details))


def find_first(model: nn.Module, rerun: Callable[[], None]) -> Finding:
    """Where the failing step went wrong on this rank.

    model   the unwrapped model; gradients of the failing step still in `main_grad` or `grad`
    rerun   runs the step's microbatches forward again, without gradients
    Looks, in this order, at parameters, at the outputs of modules in the order they are computed, and at gradients.
    """
    found = _first_output(model, rerun)  # with several stages every rank must run it
    bad = [name for name, p in model.named_parameters() if not all_finite(p)]
    if bad:
        place, quantity = _split(bad[0])
        return Finding(_placed(model, place), quantity, [f"{len(bad)} parameters are not finite before the step"])
    if found.place:
        return found
    bad = [name for name, p in model.named_parameters() if not all_finite(getattr(p, "main_grad", p.grad))]
    if bad:
        place, parameter = _split(bad[-1])
        return Finding(
            place,
            f"the gradient of {parameter}",
            [f"{len(bad)} gradients are not finite; this one is the last in the model"],
        )
    return Finding()


def all_finite(x: Any) -> bool:
    """Whether every number of a tensor, or of a pytree of tensors, is finite."""
    return all(
        bool(torch.isfinite(leaf).all())
        for leaf in pytree.tree_leaves(x)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    )


def _first_output(model: nn.Module, rerun: Callable[[], None]) -> Finding:
    """The first module, in the order of computation and the innermost first, that gives what is not finite."""
    found = Finding()

    def look(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if not found.place and not all_finite(output):
                found.place, found.quantity = _placed(model, name), "the output"

        return hook

    with probed(model) as probes, _hooked(model, look), torch.no_grad():
        rerun()
    if found.place:
        found.details = [line for name, probe in probes.items() for line in _probe_lines(name, probe)]
    return found


@contextmanager
def _hooked(model: nn.Module, look: Callable[[str], Callable[..., None]]) -> Iterator[None]:
    handles = [module.register_forward_hook(look(name)) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def probed(model: nn.Module) -> Iterator[dict[str, dict[str, Any]]]:
    """Inside, every block that keeps a `probe` fills it: "layer_3" (or its name) -> quantity -> detached value."""
    blocks = {name: module for name, module in model.named_modules() if hasattr(module, "probe")}
    blocks = {f"layer_{number}" if (number := layer_of(model, n)) else n: block for n, block in blocks.items()}
    probes: dict[str, dict[str, Any]] = {name: {} for name in blocks}
    for name, block in blocks.items():
        block.probe = probes[name]
    try:
        yield probes
    finally:
        for block in blocks.values():
            block.probe = None


def _probe_lines(name: str, probe: dict[str, Any]) -> list[str]:
    """The quantities of one block that are not finite."""
    wrong = {k: v for k, v in probe.items() if not math.isfinite(float(v))}
    return [f"{name}: {quantity} is {float(value)}" for quantity, value in wrong.items()]


def layer_of(model: nn.Module, name: str) -> int | None:
    """The number, from 1 and over all pipeline stages, of the layer that module `name` is in; None outside layers."""
    parts = name.split(".")
    above = (model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts), 0, -1))
    return next((int(number) for module in above if (number := getattr(module, "layer_number", None))), None)


def _placed(model: nn.Module, name: str) -> str:
    number = layer_of(model, name) if name else None
    return (name or "the model") + (f" (layer {number})" if number else "")


def _split(parameter: str) -> tuple[str, str]:
    place, _, name = parameter.rpartition(".")
    return place, f"parameter {name}"
