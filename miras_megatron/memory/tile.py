"""What every tile of a chunk needs: tokens heads first, gates as products, write weights of the window.

A *tile* is a run of tokens inside one chunk, all with the same anchor. Inside it (W, S) is a linear recurrence:
    S_t = m_t S_{t-1} - sum_i w[t, i] u_i          W_t = a_t W_{t-1} + S_t
so W_t = b_t W_0 + f_t S_0 - sum_i G[t, i] u_i (deep_memory 1, rules 1.3). The index i runs over the window's
tail, the last c-1 tokens before the tile, and then the tile's own tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from .features import polynomial_features
from .gate_products import keep_products, momentum_products
from .rules import Rule, gate_of_layer
from .state import MemoryInputs, MemoryState


@dataclass
class LayerGates:
    """Gates of one matrix, [B, N, T, 1] (head) or [B, N, T, D] (channel); None where the rule has none.

    side: where channel gates act: "rows" or "columns" of the matrix, None where there is none.
    """

    side: str | None
    log_keep: Tensor | None
    momentum: Tensor | None
    lr: Tensor | None
    lr_prev: Tensor | None


@dataclass
class Tokens:
    """The inputs of a run of tokens, heads first, in the state's dtype.

    key, query [B, N, T, F] (features); target, delta [B, N, T, D]; window [B, N, T, c]; gates per matrix
    """

    key: Tensor
    query: Tensor
    target: Tensor
    delta: Tensor | None
    window: Tensor | None
    gates: list[LayerGates]

    def map(self, change: Callable[[Tensor], Tensor]) -> Tokens:
        """The same tokens with `change` applied to every tensor."""
        gates = []
        for gate in self.gates:
            own: dict[str, Any] = {
                f.name: change(x) for f in fields(gate) if isinstance(x := getattr(gate, f.name), Tensor)
            }
            gates.append(replace(gate, **own))
        own = {f.name: change(x) for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor)}
        return replace(self, gates=gates, **own)

    def run(self, start: int, stop: int) -> Tokens:
        """Tokens start..stop-1, as views."""
        return self.map(lambda x: x[:, :, start:stop])

    def __len__(self) -> int:
        return self.key.shape[2]


def arrange_tokens(rule: Rule, params: dict[str, Tensor], inputs: MemoryInputs, dtype: torch.dtype) -> Tokens:
    """`inputs` [B, T, N, ...] turned heads first, with features, the residual folded into the target, gates apart."""

    def turn(x: Tensor) -> Tensor:
        return x.to(dtype).transpose(1, 2).contiguous()

    key, query, value = turn(inputs.k), turn(inputs.q), turn(inputs.v)
    target = value - key if rule.residual and rule.objective != "dot" else value
    if rule.degree > 1:
        key, query = (polynomial_features(x, params["coefficients"]) for x in (key, query))
    delta = None if inputs.delta is None else _spread(turn(inputs.delta), target.shape[-1])
    window = None if inputs.window is None else turn(inputs.window)
    gates = [_layer_gates(rule, params, inputs, i, turn) for i in range(rule.depth)]
    return Tokens(key, query, target, delta, window, gates)


def _spread(x: Tensor, width: int) -> Tensor:
    """[B, N, T] or [B, N, T, D] -> [B, N, T, D]."""
    return x if x.ndim == 4 else x.unsqueeze(-1).expand(*x.shape, width)


def _layer_gates(
    rule: Rule, params: dict[str, Tensor], inputs: MemoryInputs, layer: int, turn: Callable[[Tensor], Tensor]
) -> LayerGates:
    def gate(name: str) -> Tensor | None:
        x = gate_of_layer(getattr(inputs, name), layer)
        if x is None:
            return None
        x = turn(x)
        return x if x.ndim == 4 else x.unsqueeze(-1)

    log_keep = gate("log_keep")
    if rule.fixed_keep:
        fixed = params["log_keep"][None, :, None, None]
        log_keep = turn(fixed.transpose(1, 2)).expand(inputs.k.shape[0], -1, inputs.k.shape[1], 1)
    return LayerGates(rule.channel_side(layer), log_keep, gate("momentum"), gate("lr"), gate("lr_prev"))


@dataclass
class TileWeights:
    """The scalars of one tile and matrix; Ch is 1 (head gates) or D (channel gates).

    keep    b_t          [B, N, Ch, T]      what is left of W_0
    start   f_t          [B, N, Ch, T]      what S_0 adds; None without momentum
    write   G[t, i]      [B, N, Ch, T, c-1+T]
    momentum_keep e_T    [B, N, Ch]         what is left of S_0 at the end; None without momentum
    momentum_write n_i   [B, N, Ch, c-1+T]  what u_i takes from S at the end; None without momentum
    """

    keep: Tensor
    start: Tensor | None
    write: Tensor
    momentum_keep: Tensor | None
    momentum_write: Tensor | None


def window_writes(rule: Rule, gates: LayerGates, tokens: Tokens, seen: Tensor | None) -> Tensor:
    """w[t, i] = the rate with which token t writes gradient i, [B, N, Ch, T, c-1+T].

    Without a window r_t on the diagonal; Omega r_t gam[t, .]; swla (lr_prev, lr). Tail rows before the
    document's start (`seen` [B]) weigh nothing. With Newton-Schulz the rate acts outside the momentum.
    """
    one = torch.ones_like(tokens.key[..., :1])
    lr = one if gates.lr is None or rule.newton_schulz != "off" else gates.lr
    lr = lr.transpose(-1, -2)
    if rule.window == 1:
        return torch.diag_embed(lr)
    if rule.two_rates:
        assert gates.lr_prev is not None
        slots = torch.stack(torch.broadcast_tensors(gates.lr_prev.transpose(-1, -2), lr), -1)
    else:
        assert tokens.window is not None
        slots = lr.unsqueeze(-1) * tokens.window[:, :, None]
    return _band(slots, _missing(slots, seen))


def _missing(slots: Tensor, seen: Tensor | None) -> Tensor:
    """True where slot s of token t lies before the document's start, [B, 1, 1, T, c]."""
    count, width = slots.shape[-2:]
    position = torch.arange(count, device=slots.device)[:, None] + torch.arange(width, device=slots.device)
    known = torch.zeros(slots.shape[0], dtype=torch.int64) if seen is None else seen
    return (position < (width - 1 - known.to(slots.device))[:, None, None])[:, None, None]


def _band(slots: Tensor, missing: Tensor) -> Tensor:
    """Slots [.., T, c] laid on the band i = t .. t+c-1 of [.., T, c-1+T]."""
    count, width = slots.shape[-2:]
    index = torch.arange(count, device=slots.device)[:, None] + torch.arange(width, device=slots.device)
    values = torch.where(missing, torch.zeros_like(slots), slots)
    empty = slots.new_zeros(*slots.shape[:-1], count + width - 1)
    return empty.scatter(-1, index.expand_as(values), values)


def tile_weights(rule: Rule, gates: LayerGates, writes: Tensor) -> TileWeights:
    """b, f, G and the end weights of one tile from its gates and the window's `writes`."""
    size = writes.shape[-2]
    keeps = _keeps(gates, writes)
    inner = keeps[..., 1:, 1:]
    if gates.momentum is None:
        return TileWeights(keeps[..., 1:, 0], None, inner @ writes, None, None)
    momenta = momentum_products(gates.momentum.transpose(-1, -2))
    both = inner @ momenta[..., 1:, :]
    end = momenta[..., size, :]
    momentum_write = (end[..., None, 1:] @ writes).squeeze(-2)
    return TileWeights(keeps[..., 1:, 0], both[..., 0], both[..., 1:] @ writes, end[..., 0], momentum_write)


def _keeps(gates: LayerGates, writes: Tensor) -> Tensor:
    """P of the keep gate [B, N, Ch, T+1, T+1]; ones on and below the diagonal where everything is kept."""
    if gates.log_keep is not None:
        return keep_products(gates.log_keep.transpose(-1, -2))
    size = writes.shape[-2] + 1
    return writes.new_ones(*writes.shape[:2], 1, size, size).tril()


def with_tail(state: MemoryState, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor | None]:
    """key, target, delta of the window's tail and then the tile's tokens, [B, N, c-1+T, .]."""
    if not state.tail:
        return tokens.key, tokens.target, tokens.delta

    def join(name: str, x: Tensor | None) -> Tensor | None:
        return None if x is None else torch.cat([state.tail[name].transpose(1, 2), x], 2)

    key, target = join("key", tokens.key), join("target", tokens.target)
    assert key is not None and target is not None
    return key, target, join("delta", tokens.delta) if "delta" in state.tail else None


def next_tail(rule: Rule, state: MemoryState, tokens: Tokens) -> tuple[dict[str, Tensor], Tensor | None]:
    """The window's tail and its count of real rows after the tile."""
    if not state.tail:
        return {}, None
    joined = dict(zip(("key", "target", "delta"), with_tail(state, tokens), strict=True))
    tail = {name: x[:, :, len(tokens) :].transpose(1, 2) for name in state.tail if (x := joined[name]) is not None}
    assert state.seen is not None
    return tail, (state.seen + len(tokens)).clamp_max(rule.window - 1)
