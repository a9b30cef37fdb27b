"""What a slice of tokens does to a memory's state, as a matrix: for affine rules, whose slices compose without waiting.

The state after a slice is affine in the state before it, and every row of the matrix W goes its own way:
    w' = o + w T          w, w', o: one row of W (with those of S and of the anchor beside it), T: the transition
So T is what the rule makes of the rows of an identity under targets of zero, and o what it makes of zeros under the
true ones. Both are rows of one tall matrix here, walked once, without reads. Objective `dot` writes whatever W is:
its T only scales, entry by entry, and one row of ones tells it all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import hardshrink, pad
from torch.utils.checkpoint import checkpoint

from .chunked import cut_runs
from .fused import TILE, scan_fused, takes_fused
from .rules import Rule, gate_of_layer, is_affine
from .state import MemoryInputs, MemoryState
from .step import write_tile
from .tile import LayerGates, Tokens, arrange_tokens

TINY = {torch.float32: 1e-30, torch.float64: 1e-290}
"""Magnitudes that count as 0 in a summary."""


@dataclass(frozen=True)
class SummaryForm:
    """How a summary [B, N, blocks, rows, in] is laid out: the same for all slices of a sequence.

    blocks  matrices of the state that slices hand on: weights, momentum, and the anchor where a slice may begin
            inside a chunk
    out     rows of a matrix; a summary's first rows are the offset
    probes  rows that follow for each block of the state before the slice: its part of the transition
    scales  the transition scales entries (objective `dot`), else it is a matrix [in, in]
    """

    blocks: tuple[str, ...]
    out: int
    probes: int
    scales: bool

    @classmethod
    def of(cls, rule: Rule, inputs: MemoryInputs, inside_chunks: bool) -> SummaryForm:
        """For the gates of `inputs`. Raises ValueError where the rule is not affine under them."""
        gates = (inputs.log_keep, inputs.momentum, inputs.lr, inputs.lr_prev)
        channel = any(gate.ndim == 4 for g in gates if (gate := gate_of_layer(g, 0)) is not None)
        by_row = channel and rule.channel_side(0) == "rows"
        if not is_affine(rule, by_row):
            why = "channel gates on the rows of its matrix" if is_affine(rule) else "its choices"
            raise ValueError(f"rule {rule.name!r} has no summary of a slice: it is not affine in its state by {why}")
        blocks = ("weights", *(["momentum"] if rule.momentum else []))
        if inside_chunks and not rule.exact:
            blocks += ("anchor",)
        out, width = inputs.v.shape[-1], rule.feature_dim(inputs.k.shape[-1])
        scales = rule.objective == "dot"
        return cls(blocks, out, (out if by_row else 1) if scales else width, scales)

    @property
    def rows(self) -> int:
        """Of every block of a summary."""
        return self.out + len(self.blocks) * self.probes


def summarise_slice(
    form: SummaryForm,
    rule: Rule,
    params: dict[str, Tensor],
    inputs: MemoryInputs,
    start: MemoryState,
    arriving: MemoryState,
    before: Sequence[int],
    last_starts: Sequence[int],
    chunk_size: int = 64,
    checkpoint_every: int = 8,
) -> Tensor:
    """The summary [B, N, blocks, rows, in] of a slice, in the state's dtype.

    start        the state at which documents start
    arriving     phase, tail and seen of the state before the slice; its matrices don't matter
    before       per row the tokens that its first document has to the left
    last_starts  per row where its last document begins; what is to the left of that counts for nothing, and where
                 it begins here, the offset is all: the state after the slice, whatever came before
    """
    groups: dict[tuple[int, bool, int], list[int]] = {}
    for row, (begin, past) in enumerate(zip(last_starts, before, strict=True)):
        goes_on = begin == 0 and past > 0
        phase = int(arriving.phase[row]) if goes_on else 0
        groups.setdefault((begin, goes_on, phase), []).append(row)
    parts, order = [], []
    for (begin, goes_on, phase), rows in groups.items():
        assert phase == 0 or "anchor" in form.blocks, "a slice begins inside a chunk, the form has no anchor"
        chosen = torch.tensor(rows)
        own = inputs if len(groups) == 1 else inputs.map(_picker(chosen))
        state = _tall_state(form, (arriving if goes_on else start).rows(chosen), goes_on)
        if phase == 0 and not rule.exact:
            state = replace(state, anchor=state.weights)
        own = own.tokens(begin, own.k.shape[1])
        write = _write_fused if takes_fused(rule, inputs) else _write
        after = write(form, rule, params, own, state, phase, chunk_size, checkpoint_every)
        parts.append(torch.stack([getattr(after, name)[0] for name in form.blocks], 2))
        order += rows
    if len(groups) == 1:
        return parts[0]
    back = torch.tensor(sorted(range(len(order)), key=order.__getitem__), device=parts[0].device)
    return torch.cat(parts).index_select(0, back)


def compose_slices(form: SummaryForm, summaries: Sequence[Tensor]) -> dict[str, Tensor]:
    """Block -> matrix [B, N, out, in] after slices that follow one another from a document's start."""
    state = summaries[0][..., : form.out, :]
    for summary in summaries[1:]:
        offset, *parts = summary.split([form.out, *[form.probes] * len(form.blocks)], -2)
        for i, part in enumerate(parts):
            old = state[:, :, i : i + 1]
            offset = offset + (old * part if form.scales else old @ part)
        state = offset
    return dict(zip(form.blocks, state.unbind(2), strict=True))


def arriving_state(
    rule: Rule,
    params: dict[str, Tensor],
    start: MemoryState,
    before: Sequence[int],
    context: tuple[Tensor, Tensor] | None,
    chunk_size: int,
) -> MemoryState:
    """`start` with what a slice knows of the state before it without waiting: where its chunk and window stand.

    before   per row the tokens that its first document has to the left
    context  keys and values [B, c-1, N, D] of the tokens before the slice, zeros where there are none; None: no window
    """
    phase = [0 if rule.exact else tokens % chunk_size for tokens in before]
    state = replace(start, phase=torch.tensor(phase))
    if context is None:
        return state
    key, value = context
    tokens = arrange_tokens(rule, params, MemoryInputs(key, key, value), start.weights[0].dtype)
    seen = torch.tensor([min(tokens, rule.window - 1) for tokens in before])
    real = torch.arange(rule.window - 1) >= rule.window - 1 - seen[:, None]
    rows = {"key": tokens.key.transpose(1, 2), "target": tokens.target.transpose(1, 2)}
    tail = {name: x * real.to(x)[..., None, None] for name, x in rows.items()}
    return replace(state, tail=tail, seen=seen)


# -- tall matrices ---------------------------------------------------------------------------------------
def _picker(rows: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: x.index_select(0, rows.to(x.device))


def _tall_state(form: SummaryForm, state: MemoryState, goes_on: bool) -> MemoryState:
    """The offset's rows, then the probes of each block: zeros and units for a state that is to come, else its own."""
    like = state.weights[0]
    unit = (
        torch.ones_like(like[..., :1, :])
        if form.scales
        else torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
    )
    tall = {}
    for name in ("weights", "momentum", "anchor"):
        known: tuple[Tensor, ...] = getattr(state, name)
        if not known:
            tall[name] = known
            continue
        first = torch.zeros_like(known[0]) if goes_on else known[0]
        probes = [like.new_zeros(*like.shape[:2], form.probes, like.shape[-1]) for _ in form.blocks]
        if goes_on and name in form.blocks:
            probes[form.blocks.index(name)] = unit.expand_as(probes[0])
        tall[name] = (torch.cat([first, *probes], -2),)
    tail = dict(state.tail)
    if tail:
        tail["target"] = pad(tail["target"], (0, form.rows - form.out))
    return replace(state, weights=tall["weights"], momentum=tall["momentum"], anchor=tall["anchor"], tail=tail)


def _tall_tokens(form: SummaryForm, tokens: Tokens) -> Tokens:
    """Targets of zero for the probes, and the gates of the rows they stand for."""
    (gates,) = tokens.gates
    target = pad(tokens.target, (0, form.rows - form.out))
    return replace(tokens, target=target, query=tokens.key[..., :0], gates=[_tall_gates(form, gates)])


def _tall_gates(form: SummaryForm, gates: LayerGates) -> LayerGates:
    if gates.side != "rows":
        return gates

    def repeat(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.shape[-1] == 1 else x.repeat(1, 1, 1, 1 + len(form.blocks))

    return LayerGates(
        gates.side, repeat(gates.log_keep), repeat(gates.momentum), repeat(gates.lr), repeat(gates.lr_prev)
    )


# -- the walk --------------------------------------------------------------------------------------------
def _write(
    form: SummaryForm,
    rule: Rule,
    params: dict[str, Tensor],
    inputs: MemoryInputs,
    state: MemoryState,
    phase: int,
    chunk_size: int,
    every: int,
) -> MemoryState:
    """The tall state after the tokens; what lies between spans of `every` chunks is made again in backward."""
    tokens = _tall_tokens(form, arrange_tokens(rule, params, inputs, state.weights[0].dtype))
    for start, stop in cut_runs(phase, len(tokens), chunk_size * every, chunk_size):
        arguments = (rule, tokens.run(start, stop), state, (phase + start) % chunk_size, chunk_size)
        if torch.is_grad_enabled():
            state = checkpoint(_write_chunks, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            state = _write_chunks(*arguments)
    return state


def _write_fused(
    form: SummaryForm,
    rule: Rule,
    params: dict[str, Tensor],
    inputs: MemoryInputs,
    state: MemoryState,
    phase: int,
    chunk_size: int,
    every: int,
) -> MemoryState:
    """As `_write`, by the hand-written scan: its reads are made in vain, and it is still twice as fast."""
    inputs = inputs.map(lambda x: x.to(state.weights[0].dtype))
    folded = inputs.v - inputs.k if rule.residual and rule.objective != "dot" else inputs.v
    inputs, plain = replace(inputs, v=pad(folded, (0, form.rows - form.out))), replace(rule, residual=False)
    for start, stop in cut_runs(phase, inputs.k.shape[1], chunk_size * every, chunk_size):
        at = (phase + start) % chunk_size
        _, state = scan_fused(plain, params, inputs.tokens(start, stop), state, at, chunk_size, every)
        state = state.map(_without_tiny)
    return state


def _write_chunks(rule: Rule, tokens: Tokens, state: MemoryState, phase: int, chunk_size: int) -> MemoryState:
    for start, stop in cut_runs(phase, len(tokens), chunk_size, chunk_size):
        ends_chunk = (phase + stop) % chunk_size == 0
        for first, last in cut_runs(0, stop - start, TILE, TILE):
            tile = tokens.run(start + first, start + last)
            state = write_tile(rule, state, tile, ends_chunk and last == stop - start)
        state = state.map(_without_tiny)
    return state


def _without_tiny(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x
    apply: Any = _WithoutTiny.apply
    kept: Tensor = apply(x)
    return kept


class _WithoutTiny(torch.autograd.Function):
    """Zero for entries so small that they are as good as forgotten, in the gradient too.

    A transition decays through a whole slice, and CPUs multiply subnormal numbers ten times slower.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return hardshrink(x, TINY[x.dtype])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return hardshrink(gradients[0], TINY[gradients[0].dtype])
