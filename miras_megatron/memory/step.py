"""One tile of one chunk, for any rule: inner gradients at the anchor, reads, and the state after the tile.

Pure functions of tensors, differentiable by autograd. Which form a rule takes:
  exact delta rules   errors by a triangular solve, then the matmul form         dual.exact_errors
  linear KL           the chunk's first token by the full step, the rest linear  here
  per-token links     the walk                                                   walk.py
  all others          the matmul form                                            dual.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import retention
from .dual import apply_running, decayed, end_of_tile, exact_errors, weighted_sum
from .gate_products import keep_products
from .network import Factors, SlowNorm, apply_weights, clamp_factors, gradient_factors, read_network
from .newton_schulz import newton_schulz
from .rules import Rule
from .state import MemoryState, replace_state
from .tile import LayerGates, TileWeights, Tokens, next_tail, tile_weights, window_writes, with_tail
from .walk import needs_walk, walk_tile


def step_tile(
    rule: Rule, params: dict[str, Tensor], state: MemoryState, tokens: Tokens, phase: int, ends_chunk: bool
) -> tuple[Tensor, MemoryState]:
    """Net reads [B, N, T, D] and the state after `tokens`, which lie in one chunk, `phase` tokens after its start."""
    norm = SlowNorm.of(params, tokens.key.dtype)
    if rule.retention == "kl" and rule.kl_form == "linear" and phase == 0:
        return _kl_first_token(rule, params, norm, state, tokens, ends_chunk)
    factors = _factors(rule, norm, state, tokens)
    writes = [window_writes(rule, gates, tokens, state.seen) for gates in tokens.gates]
    if needs_walk(rule):
        pairs = _pairs(state)
        reads, pairs = walk_tile(rule, params, norm, state.anchor or state.weights, pairs, tokens, factors, writes)
    else:
        reads, pairs = _dual_tile(rule, norm, state, tokens, factors, writes, ends_chunk)
    return reads, _after(rule, state, tokens, pairs, ends_chunk)


def write_tile(rule: Rule, state: MemoryState, tokens: Tokens, ends_chunk: bool) -> MemoryState:
    """The state after `tokens` alone, for affine rules: `step_tile` without its reads.

    A matrix may have any number of rows here, the target then has as many channels.
    """
    factors = _factors(rule, None, state, tokens)
    (gates,), ((weight, momentum),) = tokens.gates, _pairs(state)
    scalars = tile_weights(rule, gates, window_writes(rule, gates, tokens, state.seen))
    end = end_of_tile(gates.side, scalars, weight, momentum, factors.errors[0], factors.inputs[0])
    return _after(rule, state, tokens, [end], ends_chunk)


def _pairs(state: MemoryState) -> list[tuple[Tensor, Tensor | None]]:
    momenta = state.momentum or (None,) * len(state.weights)
    return list(zip(state.weights, momenta, strict=True))


def _after(
    rule: Rule, state: MemoryState, tokens: Tokens, pairs: list[tuple[Tensor, Tensor | None]], ends_chunk: bool
) -> MemoryState:
    weights = tuple(weight for weight, _ in pairs)
    momentum = tuple(m for _, m in pairs if m is not None)
    tail, seen = next_tail(rule, state, tokens)
    anchor = () if rule.exact else weights if ends_chunk else state.anchor
    return replace_state(state, weights=weights, momentum=momentum, anchor=anchor, tail=tail, seen=seen)


def _factors(rule: Rule, norm: SlowNorm | None, state: MemoryState, tokens: Tokens) -> Factors:
    """The inner gradients that this tile's writes may use: the window's tail, then the tile's tokens."""
    key, target, delta = with_tail(state, tokens)
    if rule.gradient_at == "chunk":
        weights = [retention.link(rule, x) for x in (state.anchor or state.weights)]
        return gradient_factors(rule, weights, norm, key, target, delta)
    gates = tokens.gates[0]
    lr = torch.ones_like(key[..., :1]) if gates.lr is None else gates.lr
    keep = torch.zeros_like(key[..., :1]) if gates.log_keep is None else gates.log_keep
    products = keep_products(keep.transpose(-1, -2))
    after = rule.gradient_at == "decayed"
    errors = exact_errors(gates.side, products, lr.transpose(-1, -2), after, state.weights[0], key, target)
    return clamp_factors(rule, Factors([key], [errors], errors))


def _dual_tile(
    rule: Rule,
    norm: SlowNorm | None,
    state: MemoryState,
    tokens: Tokens,
    factors: Factors,
    writes: list[Tensor],
    ends_chunk: bool,
) -> tuple[Tensor, list[tuple[Tensor, Tensor | None]]]:
    applies: list[Callable[[Tensor], Tensor]] = []
    after: list[tuple[Tensor, Tensor | None]] = []
    for i, (gates, (weight, momentum)) in enumerate(zip(tokens.gates, _pairs(state), strict=True)):
        scalars, pair = tile_weights(rule, gates, writes[i]), (factors.errors[i], factors.inputs[i])
        if rule.newton_schulz == "chunk":
            apply, end = _orthogonal_tile(gates, scalars, weight, momentum, *pair, ends_chunk)
        else:
            apply = apply_running(gates.side, scalars, weight, momentum, *pair)
            end = end_of_tile(gates.side, scalars, weight, momentum, *pair)
        applies.append(
            _scaled_read(apply, retention.lq_scale(rule, state.anchor[i])) if rule.retention == "lq" else apply
        )
        after.append(end)
    return read_network(rule.depth, norm, lambda i, h: applies[i](h), tokens.query), after


def _scaled_read(apply: Callable[[Tensor], Tensor], scale: Tensor) -> Callable[[Tensor], Tensor]:
    """Moneta reads A_t through the norm frozen at the chunk's start."""
    return lambda h: scale * apply(h)


def _orthogonal_tile(
    gates: LayerGates,
    scalars: TileWeights,
    weight: Tensor,
    momentum: Tensor | None,
    errors: Tensor,
    inputs: Tensor,
    ends_chunk: bool,
) -> tuple[Callable[[Tensor], Tensor], tuple[Tensor, Tensor | None]]:
    """Newton-Schulz per chunk: tokens only decay W and feed S; the chunk's last token writes r NS5(S)."""
    assert momentum is not None and scalars.momentum_keep is not None and scalars.momentum_write is not None
    side = gates.side
    left = decayed(side, scalars.momentum_keep, momentum)
    momentum_end = left - weighted_sum(side, scalars.momentum_write, errors, inputs)
    weight_end, jump = decayed(side, scalars.keep[..., -1], weight), torch.zeros_like(weight)
    if ends_chunk:
        jump = newton_schulz(momentum_end)
        jump = jump if gates.lr is None else decayed(side, gates.lr[:, :, -1], jump)

    def apply(h: Tensor) -> Tensor:
        by_token = scalars.keep.transpose(-1, -2)
        kept = (
            (h * by_token) @ weight.transpose(-1, -2)
            if side == "columns"
            else by_token * (h @ weight.transpose(-1, -2))
        )
        last = kept[:, :, -1:] + h[:, :, -1:] @ jump.transpose(-1, -2)
        return torch.cat([kept[:, :, :-1], last], 2)

    return apply, (weight_end + jump, momentum_end)


def _kl_first_token(
    rule: Rule, params: dict[str, Tensor], norm: SlowNorm | None, state: MemoryState, tokens: Tokens, ends_chunk: bool
) -> tuple[Tensor, MemoryState]:
    """Memora, published form: the chunk's first ("lag") token takes the full step from the clamped W, and its
    result W_1 anchors the rest of the chunk, which runs linearly."""
    first, size = tokens.run(0, 1), len(tokens)
    start = tuple(w.clamp_min(retention.SMALLEST_WEIGHT) for w in state.weights)
    factors = _factors(rule, norm, replace_state(state, anchor=start), first)
    weights = []
    for i, gates in enumerate(first.gates):
        writes = window_writes(rule, gates, first, state.seen)
        write = weighted_sum(gates.side, writes[..., 0, :], factors.errors[i], factors.inputs[i])
        log_scale = params[f"scale_{i}"].to(write.dtype).log()[:, None, None]
        weights.append(retention.kl_log_step(start[i].log(), _keep_of(gates, write), write, log_scale).exp())
    read = read_network(rule.depth, norm, apply_weights(weights), first.query)
    tail, seen = next_tail(rule, state, first)
    state = replace_state(state, weights=tuple(weights), anchor=tuple(weights), tail=tail, seen=seen)
    if size == 1:
        return read, state
    rest, state = step_tile(rule, params, state, tokens.run(1, size), 1, ends_chunk)
    return torch.cat([read, rest], 2), state


def _keep_of(gates: LayerGates, like: Tensor) -> Tensor:
    if gates.log_keep is None:
        return torch.ones_like(like[..., :1, :1])
    keep = gates.log_keep[:, :, 0].exp()
    return keep.unsqueeze(-2) if gates.side == "columns" else keep.unsqueeze(-1)
