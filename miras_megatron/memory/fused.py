"""The hand-written scan of network memories under decay: forward and backward by tiles, states every span.

For rules whose stored variable is W itself, with head gates and gradients at the chunk's first weights: MLP
memories of any depth and the plain matrix, every objective, with and without momentum. Nothing in here is seen by
autograd but one Function a group of heads (fused_walk).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .features import polynomial_features
from .fused_lanes import LaneScan, kernel_for
from .fused_plan import TILE, Plan, Tile, plan_tiles
from .fused_walk import FusedScan
from .rules import Rule, gate_of_layer
from .state import MemoryInputs, MemoryState, replace_state

__all__ = ["TILE", "has_fused", "scan_fused", "takes_fused"]

CACHED_STATE = 2**21
"""Bytes of W and S that are walked together on a CPU thread: with their gradients and a tile's rows they fill L2."""


def takes_fused(rule: Rule, inputs: MemoryInputs) -> bool:
    """Whether the hand-written scan computes this rule with these gates."""
    layered = (inputs.log_keep, inputs.momentum, inputs.lr) if rule.write_rate == "input" else (inputs.log_keep,)
    gates = [gate_of_layer(gate, i) for gate in layered for i in range(rule.depth)]
    return has_fused(rule) and all(gate is None or gate.ndim == 3 for gate in gates)


def has_fused(rule: Rule) -> bool:
    """Whether the hand-written scan computes this rule where its gates are one value a head."""
    plain = rule.retention == "decay" and rule.gradient_at == "chunk" and rule.window == 1
    return plain and rule.newton_schulz == "off" and rule.max_gradient_norm is None


def scan_fused(
    rule: Rule,
    params: dict[str, Tensor],
    inputs: MemoryInputs,
    state: MemoryState,
    phase: int,
    chunk_size: int,
    every: int,
    replays: bool = False,
) -> tuple[Tensor, MemoryState]:
    """Reads [B, T, N, D] in the state's dtype and the state after the tokens (its phase is the caller's to set)."""
    inputs = inputs.map(lambda x: x.to(state.weights[0].dtype))
    plan = _plan(rule, inputs, plan_tiles(inputs.q.shape[1], 0 if rule.exact else phase, chunk_size, every), replays)
    tokens = _token_arguments(rule, params, inputs)
    matrices = [*state.weights, *state.momentum, *(state.anchor or state.weights)]
    reads, *after = _by_groups(plan, tokens, _norm(params, tokens[0].dtype), matrices)
    depth = rule.depth
    weights, momentum = tuple(after[:depth]), tuple(after[depth : depth + len(state.momentum)])
    anchor = () if rule.exact else state.anchor
    if plan.leaves_anchor:
        anchor = tuple(after[-depth:])
    elif plan.spans[-1][-1].ends and not rule.exact:
        anchor = weights
    if rule.residual and not plan.folds_residual:
        reads = reads + inputs.q
    return reads, replace_state(state, weights=weights, momentum=momentum, anchor=anchor)


def _plan(rule: Rule, inputs: MemoryInputs, spans: tuple[tuple[Tile, ...], ...], replays: bool) -> Plan:
    reopened = any(tile.opens for span in spans for tile in span)
    keeps = [gate_of_layer(inputs.log_keep, i) is not None or rule.fixed_keep for i in range(rule.depth)]
    leaves_anchor = reopened and not spans[-1][-1].ends and not rule.exact
    folds = rule.residual and rule.degree == 1
    has_delta = inputs.delta is not None
    return Plan(rule, spans, rule.depth, has_delta, rule.layer_norm, tuple(keeps), leaves_anchor, folds, replays)


def _token_arguments(rule: Rule, params: dict[str, Tensor], inputs: MemoryInputs) -> list[Tensor]:
    """key, query, value, delta and the gates [B, T, N, ...], in the order of `Arguments`; nothing is copied.

    With polynomial features the residual is folded into the value here, else tile by tile.
    """
    key, query, value = inputs.k, inputs.q, inputs.v
    if rule.degree > 1:
        value = value - key if rule.residual and rule.objective != "dot" else value
        turned = (polynomial_features(x.transpose(1, 2), params["coefficients"]) for x in (key, query))
        key, query = (x.transpose(1, 2) for x in turned)
    arguments = [key, query, value]
    if inputs.delta is not None:
        arguments.append(inputs.delta if inputs.delta.ndim == 4 else inputs.delta.unsqueeze(-1).expand_as(value))
    for i in range(rule.depth):
        log_keep, momentum, lr = (gate_of_layer(gate, i) for gate in (inputs.log_keep, inputs.momentum, inputs.lr))
        if rule.fixed_keep:
            log_keep = params["log_keep"].to(key.dtype).expand(key.shape[:3])
        lr = torch.ones_like(key[..., 0]) if lr is None else lr
        arguments += [gate for gate in (log_keep, momentum, lr) if gate is not None]
    return arguments


def _norm(params: dict[str, Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [params[name].to(dtype) for name in ("norm_weight", "norm_bias") if name in params]


def _group(matrices: list[Tensor]) -> tuple[int, int]:
    """How many rows and heads are walked together: on a CPU what stays in its cache, else all."""
    batch, heads = matrices[0].shape[:2]
    if matrices[0].device.type != "cpu":
        return batch, heads
    room = CACHED_STATE * torch.get_num_threads()
    count = max(1, room // sum(x[0, 0].numel() * x.element_size() for x in matrices))
    return max(1, count // heads), min(heads, count)


def _by_groups(plan: Plan, tokens: list[Tensor], norm: list[Tensor], matrices: list[Tensor]) -> list[Tensor]:
    """The scan over groups of rows and heads, which know nothing of each other; outputs [B, T, N, D], [B, N, ...]."""
    rows, heads = _group(matrices)
    columns = []
    for h in range(0, matrices[0].shape[1], heads):
        parts = []
        for b in range(0, matrices[0].shape[0], rows):
            cut = slice(b, b + rows), slice(h, h + heads)
            own = [x[cut].flatten(0, 1) for x in matrices]
            batch = len(tokens[0][b : b + rows])
            affine = [x[h : h + heads].repeat(batch, 1)[:, None] for x in norm]
            mine = [x[cut[0], :, cut[1]] for x in tokens]
            reads, *after = _scan(plan, [*map(_dense_rows, mine), *affine, *own])
            parts.append([reads, *(x.unflatten(0, (batch, -1)) for x in after)])
        columns.append([_join(one, 0) for one in zip(*parts, strict=True)])
    return [_join(one, 1 + (i == 0)) for i, one in enumerate(zip(*columns, strict=True))]


def _scan(plan: Plan, flat: list[Tensor]) -> tuple[Tensor, ...]:
    kernel = kernel_for(plan, flat)
    if kernel is None:
        found: tuple[Tensor, ...] = FusedScan.apply(plan, *flat)
        return found
    found = LaneScan.apply(plan, kernel, *flat)
    return found


def _dense_rows(x: Tensor) -> Tensor:
    """x [B, T, N, D] as BLAS reads a matrix of tokens, rows dense and apart; gates [B, T, N] as they are."""
    if x.ndim < 4 or (x.stride(-1) == 1 and (x.shape[1] == 1 or x.stride(1) >= x.shape[-1])):
        return x
    return x.contiguous()


def _join(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
