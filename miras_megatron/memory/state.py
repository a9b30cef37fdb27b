"""What a scan reads and what it hands on: `MemoryInputs` and the complete `MemoryState`.

A state is a pytree of tensors with the batch in dim 0. It holds all that is needed to go on from
any token, also inside an unfinished chunk; it never holds a token of the future.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .state_file import read_tensors, write_tensors

Gate = Tensor | Sequence[Tensor] | None
"""One gate for all memory layers, or one per layer (input matrix first); None where a rule has none."""


@dataclass
class MemoryInputs:
    """Everything one scan reads, for T tokens.

    q k v     [B, T, N, D]  queries, keys, values of N heads of width D
    log_keep  [B, T, N] or [B, T, N, D], <= 0   logarithm of the keep gate a; None keeps everything
    momentum  same shapes, in [0, 1]            decay m of the momentum
    lr        same shapes, >= 0                 inner learning rate r
    delta     [B, T, N] or [B, T, N, D], >= 0   threshold of the Huber objectives, shift of `value_shift`
    lr_prev   as lr                             swla's rate of the previous token's write
    window    [B, T, N, c]                      weights gam of the Omega rule, oldest token first

    A gate may be a tuple with one tensor per memory layer, the input matrix first.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_keep: Gate = None
    momentum: Gate = None
    lr: Gate = None
    delta: Tensor | None = None
    lr_prev: Gate = None
    window: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> MemoryInputs:
        """The same inputs with `change` applied to every tensor."""
        return MemoryInputs(**{f.name: _map_gate(getattr(self, f.name), change) for f in fields(self)})

    def tokens(self, start: int, stop: int) -> MemoryInputs:
        """The inputs of tokens start..stop-1, as views."""
        return self.map(lambda x: x[:, start:stop])

    def heads(self, chosen: slice) -> MemoryInputs:
        """The inputs of some of the heads, as views."""
        return self.map(lambda x: x[:, :, chosen])


def _map_gate(gate: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if gate is None:
        return None
    if isinstance(gate, Tensor):
        return change(gate)
    return tuple(change(g) for g in gate)


@dataclass
class MemoryState:
    """All that a memory needs to go on after some token.

    weights   per memory layer [B, N, out, in]: the stored variable (W; A for Moneta; log W for exact KL;
              logit W for sigmoid retention), after the last token
    momentum  per memory layer [B, N, out, in]; A of the FTRL elastic net; empty where the learner has none
    anchor    per memory layer [B, N, out, in]: the stored variable at which this chunk's gradients
              are taken. Equal to `weights` at a chunk border (phase 0)
    phase     [B] int64 on the CPU: tokens already seen of the unfinished chunk
    tail      the last c-1 tokens of a windowed rule: name -> [B, c-1, N, ...]; empty otherwise
    seen      [B] int64 on the CPU: how many rows of `tail` are real
    """

    weights: tuple[Tensor, ...]
    momentum: tuple[Tensor, ...]
    anchor: tuple[Tensor, ...]
    phase: Tensor
    tail: dict[str, Tensor] = field(default_factory=dict)
    seen: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> MemoryState:
        """The same state with `change` applied to every tensor."""
        mapped: MemoryState = pytree.tree_map_only(Tensor, change, self)
        return mapped

    def detach(self) -> MemoryState:
        """The same values, cut from the autograd graph."""
        return self.map(lambda x: x.detach())

    def rows(self, index: Tensor) -> MemoryState:
        """The states of the batch rows in `index` (int64), in that order."""
        return self.map(lambda x: x.index_select(0, index.to(x.device)))

    def heads(self, chosen: slice) -> MemoryState:
        """The state of some of the heads, as views."""

        def layers(parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(x[:, chosen] for x in parts)

        tail = {name: x[:, :, chosen] for name, x in self.tail.items()}
        return replace(
            self,
            weights=layers(self.weights),
            momentum=layers(self.momentum),
            anchor=layers(self.anchor),
            tail=tail,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Flat name -> tensor, the form that `save` writes."""
        flat: dict[str, Tensor] = {"phase": self.phase}
        for name in ("weights", "momentum", "anchor"):
            flat |= {f"{name}.{i}": x for i, x in enumerate(getattr(self, name))}
        flat |= {f"tail.{name}": x for name, x in self.tail.items()}
        return flat | ({"seen": self.seen} if self.seen is not None else {})

    @classmethod
    def from_tensors(cls, flat: dict[str, Tensor]) -> MemoryState:
        """The inverse of `tensors`."""

        def layers(name: str) -> tuple[Tensor, ...]:
            count = sum(key.startswith(name + ".") for key in flat)
            return tuple(flat[f"{name}.{i}"] for i in range(count))

        tail = {key[len("tail.") :]: x for key, x in flat.items() if key.startswith("tail.")}
        return cls(layers("weights"), layers("momentum"), layers("anchor"), flat["phase"], tail, flat.get("seen"))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to `path`, whole or not at all."""
        write_tensors(path, self.detach().tensors())

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> MemoryState:
        """Read a state that `save` wrote; nothing is unpickled but tensors.

        Raises ValueError where the file is empty, cut off, of another format or holds no state.
        """
        return cls.from_tensors(read_tensors(path, device))


pytree.register_pytree_node(
    MemoryState,
    lambda s: ([s.weights, s.momentum, s.anchor, s.phase, s.tail, s.seen], None),
    lambda children, _: MemoryState(*children),
    serialized_type_name="miras_megatron.MemoryState",
)


def join_rows(states: Sequence[MemoryState]) -> MemoryState:
    """One state with the batch rows of all `states`, in order."""
    if len(states) == 1:
        return states[0]
    columns = zip(*(pytree.tree_leaves(s) for s in states), strict=True)
    joined = [torch.cat(c) if isinstance(c[0], Tensor) else c[0] for c in columns]
    state: MemoryState = pytree.tree_unflatten(joined, pytree.tree_structure(states[0]))
    return state


def join_heads(states: Sequence[MemoryState]) -> MemoryState:
    """One state with the heads of all `states`, in order; they stand at the same token."""

    def layers(name: str) -> tuple[Tensor, ...]:
        return tuple(torch.cat(parts, 1) for parts in zip(*(getattr(s, name) for s in states), strict=True))

    tail = {name: torch.cat([s.tail[name] for s in states], 2) for name in states[0].tail}
    return replace(
        states[0], weights=layers("weights"), momentum=layers("momentum"), anchor=layers("anchor"), tail=tail
    )


def replace_state(state: MemoryState, **changes: Any) -> MemoryState:
    """A copy of `state` with some fields replaced."""
    return replace(state, **changes)
