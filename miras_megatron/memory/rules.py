"""A memory rule = structure x objective x retention x learner (the frame of Miras), and the registry of named rules.

A `Rule` is plain data: it says what is computed, `oracle` and `chunked` compute it. Wrong
combinations are refused here, all at once, each with the field, the value and the way out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .choices import PRESETS, Choices, Problem, combination_problems, find_choice_problems, value_problems
from .state import Gate, MemoryState


@dataclass(frozen=True, kw_only=True)
class Rule(Choices):
    """What one memory computes; its fields are those of `Choices`, each with a line on what it means."""

    def __post_init__(self) -> None:
        _refuse(self.name, value_problems(self) or combination_problems(self))

    # -- parameters and state ----------------------------------------------------------------------
    def init_params(
        self,
        heads: int,
        head_dim: int,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> dict[str, Tensor]:
        """The slow parameters, leading dim `heads` each.

        weight_i     [heads, out, in]  learned start of matrix i (input matrix 0): W_0; A_0 for `lq` and FTRL;
                                       logits for `kl` (W_0 = scale softmax) and `sigmoid`
        scale_i      [heads]           c of `kl`, starts at fan_in
        norm_weight, norm_bias         [heads, head_dim], where layer_norm
        coefficients [heads, degree+1] Taylor coefficients of the features, start 1/i!, where degree > 1
        log_keep     [heads]           retnet's constant
        """
        _refuse(self.name, [*_size_problems("heads", heads, 1), *_size_problems("head_dim", head_dim, 1)], "params")
        params: dict[str, Tensor] = {}
        for i, (out, fan_in) in enumerate(self.shapes(head_dim)):
            noise = torch.randn(heads, out, fan_in, generator=generator, dtype=dtype, device=device)
            params[f"weight_{i}"] = noise * self._init_std(i, fan_in)
            if self.retention == "kl":
                params[f"scale_{i}"] = torch.full((heads,), float(fan_in), dtype=dtype, device=device)
        if self.layer_norm:
            params["norm_weight"] = torch.ones(heads, head_dim, dtype=dtype, device=device)
            params["norm_bias"] = torch.zeros(heads, head_dim, dtype=dtype, device=device)
        if self.degree > 1:
            taylor = [1.0 / math.factorial(i) for i in range(self.degree + 1)]
            params["coefficients"] = torch.tensor(taylor, dtype=dtype, device=device).expand(heads, -1).clone()
        if self.fixed_keep:
            h = torch.arange(heads, dtype=dtype, device=device)
            params["log_keep"] = torch.log1p(-torch.exp2(-5.0 - h))
        return params

    def param_shapes(self, heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        """Name -> shape of everything `init_params` makes."""
        shapes: dict[str, tuple[int, ...]] = {}
        for i, matrix in enumerate(self.shapes(head_dim)):
            shapes[f"weight_{i}"] = (heads, *matrix)
            if self.retention == "kl":
                shapes[f"scale_{i}"] = (heads,)
        if self.layer_norm:
            shapes |= {"norm_weight": (heads, head_dim), "norm_bias": (heads, head_dim)}
        if self.degree > 1:
            shapes["coefficients"] = (heads, self.degree + 1)
        if self.fixed_keep:
            shapes["log_keep"] = (heads,)
        return shapes

    def _init_std(self, layer: int, fan_in: int) -> float:
        if self.init == "zeros":
            return 0.0
        if self.init == "unit" or self.retention in ("kl", "sigmoid") or (self.init == "wide_input" and layer == 0):
            return 1.0
        return fan_in**-0.5

    def start_weights(self, params: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """The stored variable before the first token, per matrix [heads, out, in], differentiable in params."""
        weights = []
        for i in range(self.depth):
            weight = params[f"weight_{i}"]
            if self.retention == "kl":
                log_weight = torch.log_softmax(weight, -1) + params[f"scale_{i}"].log()[:, None, None]
                weight = log_weight if self.kl_form == "exact" else log_weight.exp()
            weights.append(weight)
        return tuple(weights)

    def init_state(self, params: dict[str, Tensor], batch: int) -> MemoryState:
        """The state before the first token, for `batch` rows; at least float32; gradients flow to params."""
        _refuse(self.name, list(_size_problems("batch", batch, 0)), "a state")
        weights = tuple(_at_least_float32(w).expand(batch, *w.shape) for w in self.start_weights(params))
        momentum: tuple[Tensor, ...] = tuple(torch.zeros_like(w) for w in weights) if self.momentum else ()
        if self.is_ftrl:
            momentum = weights
        phase = torch.zeros(batch, dtype=torch.int64)
        tail, seen = self._empty_tail(weights[0], params, batch)
        return MemoryState(weights, momentum, () if self.exact else weights, phase, tail, seen)

    def _empty_tail(
        self, like: Tensor, params: dict[str, Tensor], batch: int
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        if self.window == 1:
            return {}, None
        heads, head_dim = like.shape[1], params[f"weight_{self.depth - 1}"].shape[-2]
        widths = {"key": like.shape[-1], "target": head_dim} | ({"delta": head_dim} if "delta" in self.gates else {})
        tail = {name: like.new_zeros(batch, self.window - 1, heads, width) for name, width in widths.items()}
        return tail, torch.zeros(batch, dtype=torch.int64)


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _size_problems(name: str, size: object, least: int) -> Iterator[str]:
    if not isinstance(size, int) or isinstance(size, bool) or size < least:
        yield f"{name} = {size!r}: must be a whole number of at least {least}"


def _refuse(name: str, problems: Sequence[Problem | str], what: str = "") -> None:
    if problems:
        deed = f"can't make {what}" if what else "can't be built"
        raise ValueError(f"rule {name!r} {deed}:\n" + "\n".join(f"  {p}" for p in problems))


RULES: dict[str, Rule] = {name: Rule(name=name, **preset) for name, preset in PRESETS.items()}


def make_rule(name: str, **choices: Any) -> Rule:
    """The named rule with some of its choices changed: `make_rule("titans", depth=3, momentum=False)`.

    Raises ValueError with every problem: an unknown rule or choice, a value that is none, choices that exclude each
    other, and given choices that have no effect in this combination, their default included (`EFFECTS`).
    """
    if name not in RULES:
        raise ValueError(f"rule = {name!r}: unknown; the named rules are {', '.join(RULES)}")
    _refuse(name, find_choice_problems(name, choices))
    return replace(RULES[name], **choices)


def gate_of_layer(gate: Gate, layer: int) -> Tensor | None:
    """The gate of memory layer `layer`: its own from a tuple, or the shared one."""
    if gate is None or isinstance(gate, Tensor):
        return gate
    return gate[layer]


def is_affine(rule: Rule, channel_rows: bool = False) -> bool:
    """Whether a slice maps state to state affinely with one transition for all rows (context_parallel `scan`).

    `channel_rows`: some gate acts per row of the matrix, which makes one transition per row.
    """
    plain = rule.depth == 1 and not rule.layer_norm and rule.retention == "decay" and rule.newton_schulz == "off"
    linear = rule.objective in ("dot", "l2") and rule.max_gradient_norm is None
    return plain and linear and not (channel_rows and rule.objective == "l2")
