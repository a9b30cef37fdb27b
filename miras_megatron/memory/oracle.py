"""The definition: one token after the other, inner gradients by autograd. Slow and obvious on purpose.

Nothing here is clever: no chunk algebra, no hand-written derivative, one batch row at a time. The fast
scans must equal it. What one token does to the memory is in `oracle_parts`; this file walks the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .oracle_parts import link, read_network, seen_weights, token_gradient, write_matrix
from .oracle_tokens import Params, Token, Tokens
from .rules import Rule
from .state import MemoryInputs, MemoryState, join_rows

CuSeqlens = Tensor | Sequence[Tensor] | None


def scan_memory(
    rule: Rule,
    params: Params,
    inputs: MemoryInputs,
    state: MemoryState,
    chunk_size: int = 64,
    cu_seqlens: CuSeqlens = None,
    checkpoint_every: int = 8,
) -> tuple[Tensor, MemoryState]:
    """Write T tokens into the memory and read each after its own write (Titans 3.1, Miras 5, ATLAS).

    params       of `rule.init_params`
    state        after the token before the first one, on any chunk phase; `rule.init_state` for a fresh memory
    chunk_size   tokens that share one gradient anchor; it is part of the function computed, but for exact rules
    cu_seqlens   document starts and T at the end, int64, one for all rows or a list with one per row.
                 Position 0 goes on from `state`; every later start begins from `rule.init_state`
    checkpoint_every   of the fast scan's signature; changes nothing here
    returns      reads [B, T, N, D] in the dtype of q, and the state after each row's last token.
                 Arithmetic is in the dtype of the state, float32 or float64
    """
    batch, length = inputs.q.shape[:2]
    dtype = state.weights[0].dtype
    params = {name: p.to(dtype) for name, p in params.items()}
    tokens = Tokens.prepare(rule, params, inputs.map(lambda x: x.to(dtype)))
    rows = []
    for b in range(batch):
        starts = _later_starts(cu_seqlens, b, length)
        rows.append(_scan_row(rule, params, tokens.row(b), state.rows(torch.tensor([b])), chunk_size, starts))
    return torch.cat([reads for reads, _ in rows]).to(inputs.q.dtype), join_rows([end for _, end in rows])


def _later_starts(cu_seqlens: CuSeqlens, row: int, length: int) -> set[int]:
    """The positions at which a new document begins, without position 0; an empty document is none.

    Raises ValueError where the cuts don't rise from 0 to the length.
    """
    if cu_seqlens is None:
        return set()
    cuts = [int(c) for c in (cu_seqlens if isinstance(cu_seqlens, Tensor) else cu_seqlens[row])]
    if cuts[0] != 0 or cuts[-1] != length or cuts != sorted(cuts):
        raise ValueError(f"cu_seqlens = {cuts} of row {row}: must rise from 0 to the length {length}")
    return set(cuts) - {0, length}


def _scan_row(
    rule: Rule, params: Params, tokens: Tokens, state: MemoryState, chunk_size: int, starts: set[int]
) -> tuple[Tensor, MemoryState]:
    """The loop over the tokens of one batch row."""
    reads = []
    for t in range(tokens.length):
        if t in starts:
            state = rule.init_state(params, 1)
        token = tokens.at(t)
        state = _write(rule, params, token, state, chunk_size)
        reads.append(_read(rule, params, token, state))
        state = _turn_chunk(rule, state, chunk_size)
    return torch.stack(reads, 1) if reads else tokens.query, state


def _write(rule: Rule, params: Params, token: Token, state: MemoryState, chunk_size: int) -> MemoryState:
    """The state after the write of `token`, inside the same chunk."""
    phase = int(state.phase)
    anchor = seen_weights(rule, _anchor(rule, token, state), first=phase == 0)
    surprise = _window_surprise(rule, params, anchor, token, state)
    last = phase == chunk_size - 1
    pairs = [
        write_matrix(rule, params, layer, token, stored, second, surprise[layer], first=phase == 0, last=last)
        for layer, (stored, second) in enumerate(zip(state.weights, state.momentum or state.weights, strict=True))
    ]
    weights = tuple(stored for stored, _ in pairs)
    state = replace(state, weights=weights, momentum=tuple(second for _, second in pairs) if state.momentum else ())
    return _advance(rule, token, state, restart=phase == 0)


def _anchor(rule: Rule, token: Token, state: MemoryState) -> tuple[Tensor, ...]:
    """The stored variable at which this token's gradient is taken."""
    if not rule.exact:
        return state.anchor
    if rule.gradient_at == "decayed":
        return tuple(keep * w for keep, w in zip(token.keep, state.weights, strict=True))
    return state.weights


def _window_surprise(
    rule: Rule, params: Params, anchor: tuple[Tensor, ...], token: Token, state: MemoryState
) -> list[Tensor]:
    """Per matrix, the weighted sum of the window's gradients, all at the current anchor (ATLAS, the Omega rule).

    A window of one has the weight 1. Tokens before the document are not in the tail and contribute nothing.
    """
    real = int(state.seen) if state.seen is not None else 0
    total = [torch.zeros_like(w) for w in anchor]
    for age in range(min(real, rule.window - 1) + 1):
        pair = (token.key, token.target, token.delta) if age == 0 else _tail_row(state, age)
        gradient = token_gradient(rule, params, anchor, *pair)
        weights = token.window_weights(rule, age)
        total = [t + w * u for t, w, u in zip(total, weights, gradient, strict=True)]
    return total


def _tail_row(state: MemoryState, age: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Key, target and delta of the token `age` tokens ago; the newest row of the tail is the last."""
    delta = state.tail.get("delta")
    return state.tail["key"][:, -age], state.tail["target"][:, -age], None if delta is None else delta[:, -age]


def _advance(rule: Rule, token: Token, state: MemoryState, restart: bool) -> MemoryState:
    """Count the token and remember it in the tail.

    After the first token of a chunk, linear KL takes its gradients at the weights that token left behind
    (Memora's lag token).
    """
    if state.seen is not None:
        rows = {"key": token.key, "target": token.target, "delta": token.delta}
        tail = {name: torch.cat([old[:, 1:], _row(rows[name])], 1) for name, old in state.tail.items()}
        state = replace(state, tail=tail, seen=(state.seen + 1).clamp_max(rule.window - 1))
    if rule.exact:
        return state
    lag_token = restart and rule.retention == "kl" and rule.kl_form == "linear"
    return replace(state, phase=state.phase + 1, anchor=state.weights if lag_token else state.anchor)


def _row(x: Tensor | None) -> Tensor:
    assert x is not None
    return x[:, None]


def _read(rule: Rule, params: Params, token: Token, state: MemoryState) -> Tensor:
    """What the running memory answers to the token's query, [1, N, D]."""
    frozen = state.anchor if rule.retention == "lq" and rule.link_read == "chunk" else state.weights
    weights = tuple(link(rule, w, norm_of) for w, norm_of in zip(state.weights, frozen, strict=True))
    read = read_network(rule, params, weights, token.query_features)
    return token.query + read if rule.residual else read


def _turn_chunk(rule: Rule, state: MemoryState, chunk_size: int) -> MemoryState:
    """At a chunk's end the running weights become the next chunk's anchor."""
    if rule.exact or int(state.phase) < chunk_size:
        return state
    return replace(state, anchor=state.weights, phase=torch.zeros_like(state.phase))
