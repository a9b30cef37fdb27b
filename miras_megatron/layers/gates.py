"""Gates of a memory from hidden states: keep (as a log), momentum, lr, delta, window weights; float32 throughout.

Rules 10.2: keep = sigmoid in log space, its bias from the horizon after which half is kept; momentum =
sigmoid; lr = lr_max sigmoid; delta = softplus. A gate is one value per head and token, or one per channel
through a low-rank projection; each matrix of the memory has its own, or all share one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, softplus

from .block_spec import BlockSpec
from .head_norm import at_least_float32
from .linear import LinearFactory, own_heads, without_decay

LAYERED = ("log_keep", "momentum", "lr", "lr_prev")
GATE_STD = 0.02


@dataclass(frozen=True)
class GateSlot:
    """One gate of one matrix (or of all, `layer` None): `width` values a head and token, 1 = a head gate."""

    name: str
    layer: int | None
    width: int


class MemoryGates(nn.Module):
    """x [B, T, d] -> the gates `spec.rule` reads, by their names in MemoryInputs.

    bias [N, G]: what the gates are before the input speaks; G values a head, slot after slot.
    """

    def __init__(self, spec: BlockSpec, factory: LinearFactory):
        super().__init__()
        self.spec = spec
        self.slots = gate_slots(spec)
        self.heads = spec.heads // factory.shards
        self.bias = own_heads(_start_bias(spec, self.slots), factory) if self.slots else None
        self.logits = nn.ModuleDict()
        for name in dict.fromkeys(slot.name for slot in self._from_input()):
            width = sum(slot.width for slot in self._from_input() if slot.name == name)
            self.logits[name] = self._projection(width, factory)

    def _from_input(self) -> list[GateSlot]:
        constant = self.spec.delta == "constant"
        return [slot for slot in self.slots if not (constant and slot.name == "delta")]

    def _projection(self, width: int, factory: LinearFactory) -> nn.Module:
        """Logits of one kind of gate, packed per head; through `gate_rank` channels where the gate is a channel's."""
        spec = self.spec
        out = spec.heads * width
        if spec.gates == "head":
            return without_decay(factory.make(spec.hidden, out, split="column", std=GATE_STD))
        down = factory.make(spec.hidden, spec.gate_rank, split="replicated", std=spec.hidden**-0.5)
        up = factory.make(spec.gate_rank, out, split="column", std=GATE_STD)
        return nn.Sequential(without_decay(down), without_decay(up))

    def forward(self, x: Tensor) -> dict[str, Tensor | tuple[Tensor, ...]]:
        """The gates as keywords of MemoryInputs: [B, T, N] or [B, T, N, D], a tuple where matrices have their own."""
        gates: dict[str, Tensor | tuple[Tensor, ...]] = {}
        if self.bias is None:
            return gates
        biases = dict(zip(self.slots, self.bias.split([slot.width for slot in self.slots], dim=-1), strict=True))
        for name in dict.fromkeys(slot.name for slot in self.slots):
            slots = [slot for slot in self.slots if slot.name == name]
            parts = self._logits(x, name, [slot.width for slot in slots])
            shaped = [
                _shape(self.spec, slot, at_least_float32(part) + at_least_float32(biases[slot]))
                for slot, part in zip(slots, parts, strict=True)
            ]
            gates[name] = shaped[0] if slots[0].layer is None else tuple(shaped)
        return gates

    def _logits(self, x: Tensor, name: str, widths: list[int]) -> list[Tensor]:
        if name not in self.logits:
            zeros = x.new_zeros(*x.shape[:2], self.heads, sum(widths))
        else:
            zeros = self.logits[name](x).unflatten(-1, (self.heads, -1))
        return list(zeros.split(widths, dim=-1))


def gate_slots(spec: BlockSpec) -> tuple[GateSlot, ...]:
    """Which gates a block's memory has, and how wide each is."""
    slots = []
    for name in spec.rule.gates:
        if name == "window":
            slots.append(GateSlot(name, None, spec.rule.window))
        elif name in LAYERED and (spec.gates_per_layer or _middle_differs(spec)):
            slots += [GateSlot(name, layer, _width(spec, layer)) for layer in range(spec.rule.depth)]
        else:
            slots.append(
                GateSlot(name, None, spec.head_dim if name == "delta" and spec.gates == "channel" else _width(spec, 0))
            )
    return tuple(slots)


def _width(spec: BlockSpec, layer: int) -> int:
    """A channel gate needs a side of the matrix that has the head's channels."""
    side = spec.rule.channel_side(layer)
    featured = side == "columns" and spec.rule.degree > 1 and layer == 0
    return spec.head_dim if spec.gates == "channel" and side is not None and not featured else 1


def _middle_differs(spec: BlockSpec) -> bool:
    """Matrices that can't share one gate, since a channel gate has no side on some of them."""
    return len({_width(spec, layer) for layer in range(spec.rule.depth)}) > 1


def horizons(spec: BlockSpec) -> Tensor:
    """[N] tokens after which each head keeps half, geometric around `spec.horizon`."""
    place = (
        torch.linspace(-1.0, 1.0, spec.heads, dtype=torch.float64)
        if spec.heads > 1
        else torch.zeros(1, dtype=torch.float64)
    )
    return spec.horizon * spec.horizon_spread**place


def _start_bias(spec: BlockSpec, slots: tuple[GateSlot, ...]) -> Tensor:
    """[N, G] logits at the start of training."""
    keep = -torch.log(torch.expm1(math.log(2.0) / horizons(spec)))
    start: dict[str, Tensor | float] = {
        "log_keep": keep[:, None],
        "momentum": _logit(spec.momentum_init),
        "lr": _logit(spec.lr_init),
        "lr_prev": _logit(spec.lr_init),
        "delta": math.log(math.expm1(spec.delta_init)),
        "window": _logit(1.0 / spec.rule.window) if spec.rule.window > 1 else 0.0,
    }
    columns = [torch.zeros(spec.heads, slot.width, dtype=torch.float64) + start[slot.name] for slot in slots]
    return torch.cat(columns, 1).float()


def _logit(share: float) -> float:
    return math.log(share / (1.0 - share))


def _shape(spec: BlockSpec, slot: GateSlot, logits: Tensor) -> Tensor:
    """Logits [B, T, N, width] -> the gate, [B, T, N] where it is one value a head."""
    maps: dict[str, Callable[[Tensor], Tensor]] = {
        "log_keep": logsigmoid,
        "delta": softplus,
        "lr": lambda z: spec.lr_max * z.sigmoid(),
        "lr_prev": lambda z: spec.lr_max * z.sigmoid(),
    }
    gate = maps.get(slot.name, torch.sigmoid)(logits)
    return gate.squeeze(-1) if slot.width == 1 else gate
