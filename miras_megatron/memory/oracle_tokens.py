"""The oracle's view of its inputs: every gate in the shape of its matrix, features and targets, token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations_with_replacement

import torch
from torch import Tensor

from .rules import Rule, gate_of_layer
from .state import Gate, MemoryInputs

Params = dict[str, Tensor]
Layers = tuple[Tensor, ...]


@dataclass(frozen=True)
class Token:
    """One token of one row, ready to be written. Gates per layer are [1, N, out or 1, in or 1]."""

    query: Tensor
    query_features: Tensor
    key: Tensor
    """phi(k), the network's input"""
    target: Tensor
    """what the network should answer to the key, without the residual: v - k, or v"""
    delta: Tensor | None
    keep: Layers
    momentum: Layers
    lr: Layers
    lr_prev: Layers
    window: Tensor | None

    def window_weights(self, rule: Rule, age: int) -> Layers:
        """Weight, per matrix, of the gradient of the token `age` tokens ago."""
        if rule.two_rates:
            return (self.lr, self.lr_prev)[age]
        if self.window is None:
            return tuple(torch.ones_like(keep) for keep in self.keep)
        return (self.window[..., rule.window - 1 - age, None, None],) * rule.depth


@dataclass(frozen=True)
class Tokens:
    """All tokens: the fields of `Token` with dims [B, T, ...] in front."""

    query: Tensor
    query_features: Tensor
    key: Tensor
    target: Tensor
    delta: Tensor | None
    keep: Layers
    momentum: Layers
    lr: Layers
    lr_prev: Layers
    window: Tensor | None

    @classmethod
    def prepare(cls, rule: Rule, params: Params, inputs: MemoryInputs) -> Tokens:
        """Features of keys and queries, targets, and every gate in the shape of its matrix.

        Raises ValueError for a gate the rule needs and hasn't got, or that can't act on a matrix.
        """
        for name in rule.gates:
            if getattr(inputs, name) is None and name != "log_keep":
                raise ValueError(f"inputs.{name} = None: rule {rule.name!r} needs this gate")
        q, k, v = inputs.q, inputs.k, inputs.v
        ones = torch.ones_like(q[..., 0])
        return cls(
            query=q,
            query_features=features(rule, params, q),
            key=features(rule, params, k),
            target=v - k if rule.residual and rule.objective != "dot" else v,
            delta=_per_channel(inputs.delta, v) if "delta" in rule.gates else None,
            keep=tuple(g.exp() for g in _gate(rule, "log_keep", _log_keep(rule, params, inputs))),
            momentum=_gate(rule, "momentum", inputs.momentum) if rule.momentum else (),
            lr=_gate(rule, "lr", inputs.lr if rule.write_rate == "input" else ones),
            lr_prev=_gate(rule, "lr_prev", inputs.lr_prev) if rule.two_rates else (),
            window=inputs.window if "window" in rule.gates else None,
        )

    @property
    def length(self) -> int:
        return self.query.shape[1]

    def _map(self, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor | Layers | None]:
        def apply(value: Tensor | Layers | None) -> Tensor | Layers | None:
            if isinstance(value, tuple):
                return tuple(change(x) for x in value)
            return None if value is None else change(value)

        return {name: apply(value) for name, value in vars(self).items()}

    def row(self, b: int) -> Tokens:
        """Batch row b, as a batch of one."""
        return Tokens(**self._map(lambda x: x[b : b + 1]))  # type: ignore[arg-type]

    def at(self, t: int) -> Token:
        """Token t."""
        return Token(**self._map(lambda x: x[:, t]))  # type: ignore[arg-type]


def _log_keep(rule: Rule, params: Params, inputs: MemoryInputs) -> Gate:
    """The keep gate of a rule: from the inputs, retnet's constant, or 0 (all is kept)."""
    everything = torch.zeros_like(inputs.q[..., 0])
    if rule.fixed_keep:
        return params["log_keep"] + everything
    return inputs.log_keep if "log_keep" in rule.gates and inputs.log_keep is not None else everything


def _per_channel(x: Tensor | None, like: Tensor) -> Tensor:
    assert x is not None
    return (x if x.dim() == like.dim() else x[..., None]).expand_as(like)


def _gate(rule: Rule, name: str, gate: Gate) -> Layers:
    """A gate per matrix: [B, T, N] acts on all of it, [B, T, N, D] on its rows or columns."""
    layers = []
    for layer in range(rule.depth):
        x = gate_of_layer(gate, layer)
        assert x is not None
        if x.dim() == 3:
            layers.append(x[..., None, None])
            continue
        side = rule.channel_side(layer)
        if side is None:
            raise ValueError(
                f"inputs.{name} of matrix {layer} has one value per channel, but at depth {rule.depth} and degree "
                f"{rule.degree} that matrix has no side of the head's width; give it one value per head, [B, T, N]"
            )
        layers.append(x[..., :, None] if side == "rows" else x[..., None, :])
    return tuple(layers)


def features(rule: Rule, params: Params, z: Tensor) -> Tensor:
    """Polynomial features phi(z): all monomials of degree 0 .. p, those of degree i times coefficient i (ATLAS).

    z [..., N, D]; returns [..., N, binom(D + p, p)], the constant first. Degree 1 is off: phi(z) = z.
    """
    if rule.degree == 1:
        return z
    columns = []
    for degree in range(rule.degree + 1):
        for picked in combinations_with_replacement(range(z.shape[-1]), degree):
            monomial = torch.ones_like(z[..., 0])
            for channel in picked:
                monomial = monomial * z[..., channel]
            columns.append(params["coefficients"][:, degree] * monomial)
    return torch.stack(columns, -1)
