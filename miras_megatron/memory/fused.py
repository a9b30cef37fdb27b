"""The hand-written scan of network memories under decay: forward and backward by tiles, states every span.

For rules whose stored variable is W itself, with head gates and gradients at the chunk's first weights: MLP
memories of any depth and the plain matrix, every objective, with and without momentum. Nothing in here is seen by
autograd but one Function a group of heads (fused_walk).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .fused_plan import TILE, Plan, Tile, plan_tiles
from .fused_walk import FusedScan
from .rules import Rule
from .state import MemoryState, replace_state
from .tile import Tokens

__all__ = ["TILE", "scan_fused", "takes_fused"]

CACHED_STATE = 2**20
"""Bytes of W and S that are walked together on a CPU thread: with their gradients and a tile's rows they fill L2."""


def takes_fused(rule: Rule, tokens: Tokens) -> bool:
    """Whether the hand-written scan computes this rule with these gates."""
    plain = rule.retention == "decay" and rule.gradient_at == "chunk" and rule.window == 1
    usual = rule.newton_schulz == "off" and rule.max_gradient_norm is None
    gates = [g for one in tokens.gates for g in (one.log_keep, one.momentum, one.lr) if g is not None]
    return plain and usual and all(gate.shape[-1] == 1 for gate in gates)


def scan_fused(
    rule: Rule, params: dict[str, Tensor], tokens: Tokens, state: MemoryState, phase: int, chunk_size: int, every: int
) -> tuple[Tensor, MemoryState]:
    """Net reads [B, N, T, D] and the state after the tokens (its phase is the caller's to set)."""
    batch, heads, length = tokens.key.shape[:3]
    plan = _plan(rule, tokens, plan_tiles(length, 0 if rule.exact else phase, chunk_size, every))
    reads, *after = _by_groups(plan, _flat_arguments(rule, params, tokens, state), _group(state, batch * heads))

    def unflat(x: Tensor) -> Tensor:
        return x.unflatten(0, (batch, heads))

    depth = rule.depth
    weights = tuple(unflat(x) for x in after[:depth])
    momentum = tuple(unflat(x) for x in after[depth : depth + len(state.momentum)])
    anchor = () if rule.exact else state.anchor
    if plan.leaves_anchor:
        anchor = tuple(unflat(x) for x in after[-depth:])
    elif plan.spans[-1][-1].ends and not rule.exact:
        anchor = weights
    return unflat(reads), replace_state(state, weights=weights, momentum=momentum, anchor=anchor)


def _plan(rule: Rule, tokens: Tokens, spans: tuple[tuple[Tile, ...], ...]) -> Plan:
    reopened = any(tile.opens for span in spans for tile in span)
    has_keep = tuple(gates.log_keep is not None for gates in tokens.gates)
    leaves_anchor = reopened and not spans[-1][-1].ends and not rule.exact
    return Plan(rule, spans, rule.depth, tokens.delta is not None, rule.layer_norm, has_keep, leaves_anchor)


def _flat_arguments(rule: Rule, params: dict[str, Tensor], tokens: Tokens, state: MemoryState) -> list[Tensor]:
    """Every tensor with batch and heads as one leading dim, in the order of `Arguments`."""

    def flat(x: Tensor) -> Tensor:
        return x.flatten(0, 1)

    arguments = [flat(x) for x in (tokens.key, tokens.query, tokens.target, tokens.delta) if x is not None]
    if rule.layer_norm:
        batch, dtype = tokens.key.shape[0], tokens.key.dtype
        arguments += [params[name].to(dtype).repeat(batch, 1)[:, None] for name in ("norm_weight", "norm_bias")]
    for gates in tokens.gates:
        arguments += [flat(g.squeeze(-1)) for g in (gates.log_keep, gates.momentum, gates.lr) if g is not None]
        if gates.lr is None:
            arguments.append(flat(torch.ones_like(tokens.key[..., 0])))
    return [*arguments, *(flat(x) for x in (*state.weights, *state.momentum, *(state.anchor or state.weights)))]


def _group(state: MemoryState, count: int) -> int:
    """How many of `count` heads are walked together: on a CPU what stays in its cache, else all."""
    if state.weights[0].device.type != "cpu":
        return count
    matrices = [x[0, 0] for x in (*state.weights, *state.momentum)]
    room = CACHED_STATE * torch.get_num_threads()
    return max(1, room // sum(x.numel() * x.element_size() for x in matrices))


def _by_groups(plan: Plan, arguments: list[Tensor], size: int) -> list[Tensor]:
    """The scan over groups of heads, which know nothing of each other; outputs joined."""
    if arguments[0].shape[0] <= size:
        return list(FusedScan.apply(plan, *arguments))
    parts = zip(*(x.split(size) for x in arguments), strict=True)
    return [torch.cat(one) for one in zip(*(FusedScan.apply(plan, *part) for part in parts), strict=True)]
