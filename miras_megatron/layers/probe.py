"""The inner loop made visible: surprise, norms, gates, inner loss before and after a write; detached numbers.

Blocks with a memory alone look at the last chunk of a microbatch's first row (persistent rows are tokens where they are
written); MAC at the last segments of its longest documents. Where a row is walked in pieces, these are of the last
piece. Carries that scan heads apart (heads, and the relay with head groups) leave probes empty.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..memory import MemoryInputs, MemoryState
from .memory_core import MemoryCore

Probe = dict[str, float]


@torch.no_grad()
def look_inside(core: MemoryCore, probe: Probe, inputs: MemoryInputs, before: MemoryState, after: MemoryState) -> None:
    """Fill `probe` from the write of `inputs` [B, T, ...] that led from `before` to `after`.

    surprise           mean norm of the error f_W(k) - v of those tokens at the state before them
    inner_loss_before  half its mean square norm;  inner_loss_after  the same at the state after them
    state_norm, momentum_norm  mean Frobenius norm of a head's memory (all its matrices) after them
    keep, momentum, lr, lr_prev, delta, window  means over tokens and heads
    """
    first, last = _errors(core, before, inputs), _errors(core, after, inputs)
    probe["surprise"] = _mean(first.norm(dim=-1))
    probe["inner_loss_before"] = _mean(0.5 * first.square().sum(-1))
    probe["inner_loss_after"] = _mean(0.5 * last.square().sum(-1))
    probe["state_norm"] = _norm(after.weights)
    if after.momentum:
        probe["momentum_norm"] = _norm(after.momentum)
    for name in core.spec.rule.gates:
        gate = getattr(inputs, name)
        parts = [gate] if isinstance(gate, Tensor) else list(gate)
        label, means = name.removeprefix("log_"), [_mean(p.exp() if name == "log_keep" else p) for p in parts]
        probe[label] = sum(means) / len(means)


@torch.no_grad()
def look_at_last_chunk(core: MemoryCore, probe: Probe, inputs: MemoryInputs, start: MemoryState, first: int) -> None:
    """`look_inside` for the last chunk of row 0, whose last document begins at token `first` (0: goes on from `start`).

    The row is walked once more, which costs 1/B of a forward pass. Where these tokens begin inside the last chunk,
    `before` is the state in the middle of it, and what was written of it before is not looked at.
    """
    row = inputs.map(lambda x: x[:1].detach())
    tokens, chunk = inputs.q.shape[1], core.spec.chunk_size
    state = start.detach().rows(torch.tensor([0])) if first == 0 else core.start(1)
    phase = int(state.phase[0])
    cut = max(first, first - phase + (tokens - first + phase - 1) // chunk * chunk)
    if cut > first:
        _, state = core.scan(row.tokens(first, cut), state)
    part = row.tokens(cut, tokens)
    _, after = core.scan(part, state)
    look_inside(core, probe, part, state, after)


def _errors(core: MemoryCore, state: MemoryState, inputs: MemoryInputs) -> Tensor:
    return core.read(state, inputs.k) - inputs.v


def _norm(weights: tuple[Tensor, ...]) -> float:
    square = sum(w.square().sum((-2, -1)) for w in weights)
    assert isinstance(square, Tensor)
    return _mean(square.sqrt())


def _mean(x: Tensor) -> float:
    return float(x.mean())
