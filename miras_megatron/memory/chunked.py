"""`scan_memory` in matmul form: the fast reference that every kernel is compared with; it equals `oracle`.

A sequence is walked chunk by chunk: the gradients of a chunk are taken at its first weights, and inside it
(W, S) is a linear recurrence, so reads and writes are matrix products (rules 1.3). Chunks longer than TILE are
walked in tiles with the anchor frozen, which is exact (deep_memory 3). The state is kept only every
`checkpoint_every` chunks; what lies between is recomputed in backward. Rules whose memory is a network with
decay and head gates take the hand-written backward of `fused.py`, all others autograd over `step.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from . import retention
from .checks import check_read, check_scan
from .features import polynomial_features
from .fused import TILE, scan_fused, takes_fused
from .lanes import document_cuts, scan_lanes
from .network import SlowNorm, apply_weights, read_network
from .rules import Rule
from .state import MemoryInputs, MemoryState, replace_state
from .step import step_tile
from .tile import Tokens, arrange_tokens


def scan_memory(
    rule: Rule,
    params: dict[str, Tensor],
    inputs: MemoryInputs,
    state: MemoryState,
    chunk_size: int = 64,
    cu_seqlens: Tensor | Sequence[Tensor] | None = None,
    checkpoint_every: int = 8,
) -> tuple[Tensor, MemoryState]:
    """Write T tokens into the memory and read it after each: y_t = f_{W_t}(q_t).

    rule, params      from `make_rule` and `rule.init_params`
    inputs            [B, T, N, ...], any float dtype; computed in the state's dtype (float32 or float64)
    state             where to go on from, e.g. `rule.init_state(params, B)`; may stand inside a chunk
    chunk_size        tokens that share one gradient anchor; semantic, but for `rule.exact` rules only a tile
    cu_seqlens        borders of packed documents, [0, .., T] for all rows or one such tensor a row; the first
                      document goes on from `state`, every later one starts afresh, chunk grid included
    checkpoint_every  chunks between two states kept for backward
    returns           reads [B, T, N, D] in q's dtype, and the state after each row's last token
    A batch of no rows reads [0, T, N, D]. Raises ValueError with every problem of the arguments. Gradients flow to
    inputs, params and state.
    """
    check_scan(rule, params, inputs, state, chunk_size, checkpoint_every)
    batch, length = inputs.q.shape[:2]

    def scan(part: MemoryInputs, start: MemoryState) -> tuple[Tensor, MemoryState]:
        return _scan_uniform(rule, params, part, start, chunk_size, checkpoint_every)

    cuts = document_cuts(cu_seqlens, batch, length)
    if batch == 0:
        return read_memory(rule, params, state, inputs.q), state
    if all(len(cut) == 2 for cut in cuts) and bool((state.phase == state.phase[0]).all()):
        return scan(inputs, state)
    return scan_lanes(scan, inputs, state, lambda rows: rule.init_state(params, rows), cuts)


def replay_scan(
    rule: Rule,
    params: dict[str, Tensor],
    inputs: MemoryInputs,
    state: MemoryState,
    chunk_size: int = 64,
    checkpoint_every: int = 8,
) -> tuple[Tensor, MemoryState]:
    """`scan_memory` for a recomputation: keeps for backward what that keeps, but walks nothing; values are blank.

    One document; rules and gates of the hand-written scan (`has_fused`), whose backward needs no value of its forward
    but states that the first walk has kept. Under torch's checkpoint this must be the last that is computed.
    """
    assert takes_fused(rule, inputs)
    assert rule.exact or bool((state.phase == state.phase[0]).all()), "rows at different places of their chunks"
    phase = 0 if rule.exact else int(state.phase[0])
    state = state if phase or rule.exact else replace_state(state, anchor=state.weights)
    reads, after = scan_fused(rule, params, inputs, state, phase, chunk_size, checkpoint_every, replays=True)
    return reads.to(inputs.q.dtype), after


def read_memory(rule: Rule, params: dict[str, Tensor], state: MemoryState, q: Tensor) -> Tensor:
    """Read the running weights with queries q [B, T, N, D] without writing; returns [B, T, N, D] in q's dtype.

    Raises ValueError with every problem of the arguments.
    """
    check_read(rule, params, state, q)
    dtype = state.weights[0].dtype
    plain = q.to(dtype).transpose(1, 2)
    query = polynomial_features(plain, params["coefficients"]) if rule.degree > 1 else plain
    if rule.retention == "lq":
        frozen = state.weights if rule.link_read == "token" else state.anchor
        pairs = zip(state.weights, frozen, strict=True)
        weights = [retention.lq_shape(rule, w) * retention.lq_scale(rule, norm) for w, norm in pairs]
    else:
        weights = [retention.link(rule, w) for w in state.weights]
    read = read_network(rule.depth, SlowNorm.of(params, dtype), apply_weights(weights), query)
    return (read + plain if rule.residual else read).transpose(1, 2).to(q.dtype)


def _scan_uniform(
    rule: Rule, params: dict[str, Tensor], inputs: MemoryInputs, state: MemoryState, chunk_size: int, every: int
) -> tuple[Tensor, MemoryState]:
    """Rows that all stand at the same phase, one document each."""
    phase, length = int(state.phase[0]), inputs.q.shape[1]
    if phase == 0 and not rule.exact:
        state = replace_state(state, anchor=state.weights)
    scan = scan_fused if takes_fused(rule, inputs) else _scan_spans
    reads, state = scan(rule, params, inputs, state, phase, chunk_size, every)
    state = replace_state(state, phase=torch.full_like(state.phase, 0 if rule.exact else (phase + length) % chunk_size))
    return reads.to(inputs.q.dtype), state


def _scan_spans(
    rule: Rule,
    params: dict[str, Tensor],
    inputs: MemoryInputs,
    state: MemoryState,
    phase: int,
    chunk_size: int,
    every: int,
) -> tuple[Tensor, MemoryState]:
    """Spans of `every` chunks; inside a span nothing is kept for backward but its first state and its inputs."""
    tokens, reads = arrange_tokens(rule, params, inputs, state.weights[0].dtype), []
    for start, stop in cut_runs(phase, len(tokens), chunk_size * every, chunk_size):
        at = (phase + start) % chunk_size
        arguments = (rule, params, tokens.run(start, stop), state, at, chunk_size)
        if torch.is_grad_enabled():
            read, state = checkpoint(_scan_chunks, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            read, state = _scan_chunks(*arguments)
        reads.append(read)
    read = torch.cat(reads, 2).transpose(1, 2)
    return (read + inputs.q.to(read.dtype) if rule.residual else read), state


def cut_runs(phase: int, length: int, step: int, grid: int) -> Iterator[tuple[int, int]]:
    """Runs of at most `step` tokens that end on multiples of `grid`, counted from `phase` tokens before token 0."""
    start = 0
    while start < length:
        stop = min(length, start + step - (phase + start) % grid)
        yield start, stop
        start = stop


def _scan_chunks(
    rule: Rule, params: dict[str, Tensor], tokens: Tokens, state: MemoryState, phase: int, chunk_size: int
) -> tuple[Tensor, MemoryState]:
    reads = []
    for start, stop in cut_runs(phase, len(tokens), chunk_size, chunk_size):
        at = (phase + start) % chunk_size
        for first, last in cut_runs(0, stop - start, TILE, TILE):
            tile = tokens.run(start + first, start + last)
            ends_chunk = at + last == chunk_size
            read, state = step_tile(rule, params, state, tile, at + first, ends_chunk)
            reads.append(read)
    return torch.cat(reads, 2), state
