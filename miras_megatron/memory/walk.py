"""One tile token by token: retentions whose weights are no linear function of the writes inside a chunk.

Exact KL, `lq` with an elementwise or running link, elastic net, sigmoid and Newton-Schulz at every token. The
gradients are those of the chunk's anchor, computed for all tokens at once; only retention and read walk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import retention
from .dual import weighted_sum
from .network import Factors, SlowNorm, apply_weights, read_network
from .newton_schulz import newton_schulz
from .rules import Rule
from .tile import LayerGates, Tokens

Pair = tuple[Tensor, Tensor | None]
"""The stored variable of one matrix and its momentum (or A beside W)."""


def needs_walk(rule: Rule) -> bool:
    """Whether a rule's tiles can't take the matmul form."""
    if rule.retention == "lq":
        return rule.link == "exact_link" or rule.link_read == "token"
    if rule.retention == "kl":
        return rule.kl_form == "exact"
    return rule.retention in ("elastic_net", "sigmoid") or rule.newton_schulz == "token"


def walk_tile(
    rule: Rule,
    params: dict[str, Tensor],
    norm: SlowNorm | None,
    anchor: Sequence[Tensor],
    pairs: list[Pair],
    tokens: Tokens,
    factors: Factors,
    writes: list[Tensor],
) -> tuple[Tensor, list[Pair]]:
    """Reads [B, N, T, D] and the pairs after the tile; `anchor` holds the chunk's first stored variables."""
    steps = [_step_of(rule, params, i, anchor[i]) for i in range(rule.depth)]
    reads = []
    for t in range(len(tokens)):
        weights = []
        for i, gates in enumerate(tokens.gates):
            write = _write(rule, gates.side, writes[i], factors.errors[i], factors.inputs[i], t)
            pairs[i], weight = steps[i](pairs[i], write, _gates_of_token(gates, t))
            weights.append(weight)
        reads.append(read_network(rule.depth, norm, apply_weights(weights), tokens.query[:, :, t : t + 1]))
    return torch.cat(reads, 2), pairs


def _write(rule: Rule, side: str | None, writes: Tensor, errors: Tensor, inputs: Tensor, t: int) -> Tensor:
    """sum over the window of w[t, i] u_i, [B, N, out, in]."""
    window = slice(t, t + rule.window)
    return weighted_sum(side, writes[..., t, window], errors[:, :, window], inputs[:, :, window])


def _gates_of_token(gates: LayerGates, t: int) -> dict[str, Tensor]:
    """keep, lr and momentum of token t, shaped to multiply [B, N, out, in]."""

    def at(x: Tensor) -> Tensor:
        return x[:, :, t].unsqueeze(-2) if gates.side == "columns" else x[:, :, t].unsqueeze(-1)

    named = {"keep": gates.log_keep, "lr": gates.lr, "momentum": gates.momentum}
    shaped = {name: at(x) for name, x in named.items() if x is not None}
    return shaped | ({"keep": shaped["keep"].exp()} if "keep" in shaped else {})


Step = Callable[[Pair, Tensor, dict[str, Tensor]], tuple[Pair, Tensor]]


def _kept(x: Tensor, gates: dict[str, Tensor]) -> Tensor:
    return gates["keep"] * x if "keep" in gates else x


def _step_of(rule: Rule, params: dict[str, Tensor], layer: int, anchor: Tensor) -> Step:
    """The token step of one matrix: (pair, write = r u, gates) -> (pair after, weights to read with)."""
    if rule.retention == "lq":
        return _lq_step(rule, retention.lq_scale(rule, anchor))
    if rule.retention == "kl":
        return _kl_step(params[f"scale_{layer}"].to(anchor.dtype).log()[:, None, None])
    if rule.retention == "sigmoid":
        return lambda pair, write, gates: ((pair[0] - write, None), (pair[0] - write).sigmoid())
    if rule.retention == "decay":
        return _newton_schulz_step
    return _ftrl_step(rule) if rule.is_ftrl else _elastic_step(rule)


def _lq_step(rule: Rule, frozen: Tensor) -> Step:
    def step(pair: Pair, write: Tensor, gates: dict[str, Tensor]) -> tuple[Pair, Tensor]:
        accumulator = _kept(pair[0], gates) - write
        scale = frozen if rule.link_read == "chunk" else retention.lq_scale(rule, accumulator)
        return (accumulator, None), retention.lq_shape(rule, accumulator) * scale

    return step


def _kl_step(log_scale: Tensor) -> Step:
    def step(pair: Pair, write: Tensor, gates: dict[str, Tensor]) -> tuple[Pair, Tensor]:
        keep = gates.get("keep", torch.ones_like(write[..., :1, :1]))
        log_weight = retention.kl_log_step(pair[0], keep, write, log_scale)
        return (log_weight, None), log_weight.exp()

    return step


def _rate(write: Tensor, gates: dict[str, Tensor]) -> Tensor:
    return gates["lr"] if "lr" in gates else torch.ones_like(write[..., :1, :1])


def _elastic_step(rule: Rule) -> Step:
    def step(pair: Pair, write: Tensor, gates: dict[str, Tensor]) -> tuple[Pair, Tensor]:
        weight = retention.elastic_step(rule, pair[0], write, _rate(write, gates))
        return (weight, None), weight

    return step


def _ftrl_step(rule: Rule) -> Step:
    def step(pair: Pair, write: Tensor, gates: dict[str, Tensor]) -> tuple[Pair, Tensor]:
        assert pair[1] is not None
        accumulator = pair[1] - write
        weight = retention.soft_threshold(rule, accumulator, _rate(write, gates) / rule.c1)
        return (weight, accumulator), weight

    return step


def _newton_schulz_step(pair: Pair, write: Tensor, gates: dict[str, Tensor]) -> tuple[Pair, Tensor]:
    assert pair[1] is not None
    momentum = gates["momentum"] * pair[1] - write
    weight = _kept(pair[0], gates) + _rate(write, gates) * newton_schulz(momentum)
    return (weight, momentum), weight
