"""What one token does to a memory, for the oracle: network, error signal, gradient, retention step.

Every function is one equation, written from the papers in the notation of README.md and differentiated by
autograd only. Weights are [B, N, out, in], activations [B, N, width]; B is 1 in the oracle's loop.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from .oracle_tokens import Layers, Params, Token
from .rules import Rule

LN_EPS = 1e-5
NORM_EPS = 1e-6
NEWTON_SCHULZ_EPS = 1e-7
SIMPLEX_FLOOR = 1e-6


def read_network(rule: Rule, params: Params, weights: Layers, x: Tensor) -> Tensor:
    """f_W(z) without its residual: LN(W_out gelu( ... W_in phi(z))), x = phi(z) [B, N, width] (Titans 3.1)."""
    for layer, weight in enumerate(weights):
        x = torch.einsum("bnoi,bni->bno", weight, F.gelu(x) if layer else x)
    if not rule.layer_norm:
        return x
    centred = x - x.mean(-1, keepdim=True)
    spread = (centred.square().mean(-1, keepdim=True) + LN_EPS).sqrt()
    return centred / spread * params["norm_weight"] + params["norm_bias"]


def _sign(rule: Rule, x: Tensor) -> Tensor:
    return torch.tanh(rule.sharpness * x)


def _direction(e: Tensor) -> tuple[Tensor, Tensor]:
    """||e|| and e / ||e||, the latter 0 where e is 0."""
    norm: Tensor = torch.linalg.vector_norm(e, dim=-1, keepdim=True)
    return norm, e / torch.where(norm > 0, norm, 1.0)


def error_signal(rule: Rule, e: Tensor, target: Tensor, delta: Tensor | None) -> Tensor:
    """g = dl/d(prediction), e = prediction - target; the rate absorbs the factors 2 and p (Miras, table of biases)."""
    if rule.objective == "dot":
        return -target
    if rule.objective == "l2" or (rule.objective == "lp" and rule.p == 2):
        return e
    if rule.objective == "lp":
        return _sign(rule, e) * (e.square() + 1e-6).pow((rule.p - 1) / 2)
    assert delta is not None
    norm, direction = _direction(e)
    if rule.objective == "huber_coordinate":
        return torch.where(e.abs() <= delta, e, delta * e.sign())
    if rule.objective == "huber_norm":
        return torch.where(norm <= delta, e, delta * direction)
    if rule.objective == "huber_mixed":
        return torch.where(norm <= delta, e, delta * _sign(rule, e))
    assert rule.objective == "value_shift"
    return e + delta * direction


def token_gradient(
    rule: Rule, params: Params, weights: Layers, key: Tensor, target: Tensor, delta: Tensor | None
) -> Layers:
    """u: the gradient of one token's loss at `weights`, each matrix's norm clamped where the rule says so."""
    outer = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (*weights, *params.values(), key, target, delta)
    )
    with torch.enable_grad():
        # Fresh nodes: only the direct way from the weights to the loss counts, also where keys depend on a state.
        at = tuple(w.clone() if w.requires_grad else w.detach().requires_grad_() for w in weights)
        prediction = read_network(rule, params, at, key)
        signal = error_signal(rule, prediction - target, target, delta)
        gradient = torch.autograd.grad(prediction, at, grad_outputs=signal, create_graph=outer, retain_graph=outer)
    return tuple(clamp_norm(u, rule.max_gradient_norm) for u in gradient)


def clamp_norm(u: Tensor, limit: float | None) -> Tensor:
    """u scaled to at most the Frobenius norm `limit`."""
    if limit is None:
        return u
    norm: Tensor = torch.linalg.vector_norm(u, dim=(-2, -1), keepdim=True)
    return u * (limit / norm.clamp_min(limit))


def lq_link(rule: Rule, stored: Tensor, norm_of: Tensor) -> Tensor:
    """Moneta's map A -> W, with the norm of `norm_of` (Miras, l_q stability)."""
    p = rule.q / (rule.q - 1)
    order = p if rule.link == "exact_link" else rule.q
    norm: Tensor = torch.linalg.vector_norm(norm_of, order, dim=(-2, -1), keepdim=True).clamp_min(NORM_EPS)
    if rule.link == "exact_link":
        return stored.sign() * stored.abs().pow(p - 1) / norm.pow(p - 2)
    return stored / (norm.pow(rule.q - 2) if rule.link == "printed" else norm)


def soft_threshold(rule: Rule, x: Tensor, threshold: Tensor) -> Tensor:
    """sign(x) max(0, |x| - gam), or its smooth form |x| arctan(x / gam) / (pi / 2), x itself at gam = 0."""
    if rule.soft == "hard":
        return x.sign() * (x.abs() - threshold).clamp_min(0)
    safe = torch.where(threshold > 0, threshold, 1.0)
    return torch.where(threshold > 0, x.abs() * torch.atan(x / safe) / (math.pi / 2), x)


def link(rule: Rule, stored: Tensor, norm_of: Tensor) -> Tensor:
    """The weights W that belong to the stored variable; the FTRL form stores W beside its A."""
    if rule.retention == "lq":
        return lq_link(rule, stored, norm_of)
    if rule.retention == "kl" and rule.kl_form == "exact":
        return stored.exp()
    if rule.retention == "sigmoid":
        return stored.sigmoid()
    return stored


def seen_weights(rule: Rule, anchor: Layers, first: bool) -> Layers:
    """The weights at which gradients are taken; linear KL puts a chunk's start back on the positive side."""
    if first and rule.retention == "kl" and rule.kl_form == "linear":
        return tuple(w.clamp_min(SIMPLEX_FLOOR) for w in anchor)
    return tuple(link(rule, w, w) for w in anchor)


def write_matrix(
    rule: Rule,
    params: Params,
    layer: int,
    token: Token,
    stored: Tensor,
    second: Tensor,
    surprise: Tensor,
    *,
    first: bool,
    last: bool,
) -> tuple[Tensor, Tensor]:
    """The stored variable of one matrix after the token, and its second one; `first`, `last` of its chunk.

    second   [B, N, out, in]   the momentum S, A of the FTRL form, or unused and returned as it came
    surprise [B, N, out, in]   weighted sum of the window's gradients, with both rates inside for swla
    """
    keep, lr = token.keep[layer], token.lr[layer]
    step = surprise if rule.two_rates else lr * surprise
    if rule.momentum:
        return _momentum_write(rule, keep, token.momentum[layer], lr, stored, second, surprise, step, last)
    if rule.retention == "kl":
        return _simplex_write(rule, keep, stored, step, params[f"scale_{layer}"], first), second
    if rule.retention == "elastic_net" and rule.elastic_form == "ftrl":
        return soft_threshold(rule, second - step, lr / rule.c1), second - step
    if rule.retention == "elastic_net":
        shrink = rule.c2 / (rule.c2 + lr)
        threshold = lr * rule.c2 / (rule.c1 * (lr + rule.c2))
        return soft_threshold(rule, shrink * (stored - step), threshold), second
    return keep * stored - step, second


def _momentum_write(
    rule: Rule,
    keep: Tensor,
    decay: Tensor,
    lr: Tensor,
    stored: Tensor,
    momentum: Tensor,
    surprise: Tensor,
    step: Tensor,
    last: bool,
) -> tuple[Tensor, Tensor]:
    """S = m S - r u, W = a W + S (Titans 3.1); or S = m S - u, W = a W + r NS5(S) (ATLAS)."""
    if rule.newton_schulz == "off":
        momentum = decay * momentum - step
        return keep * stored + momentum, momentum
    momentum = decay * momentum - surprise
    if rule.newton_schulz == "chunk" and not last:
        return keep * stored, momentum
    return keep * stored + lr * newton_schulz(momentum), momentum


def newton_schulz(s: Tensor) -> Tensor:
    """Five quintic Newton-Schulz steps towards the nearest orthogonal matrix (ATLAS, Muon's coefficients)."""
    norm: Tensor = torch.linalg.vector_norm(s, dim=(-2, -1), keepdim=True).clamp_min(NEWTON_SCHULZ_EPS)
    x = s / norm
    tall = s.shape[-2] > s.shape[-1]
    x = x.mT if tall else x
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def _simplex_write(rule: Rule, keep: Tensor, stored: Tensor, step: Tensor, scale: Tensor, first: bool) -> Tensor:
    """c softmax(a log W - r u) over each row (Memora); the linear form does so at a chunk's first token only."""
    scale = scale[:, None, None]
    if rule.kl_form == "exact":
        return torch.log_softmax(keep * stored - step, -1) + scale.log()
    if first:
        return scale * torch.softmax(keep * stored.clamp_min(SIMPLEX_FLOOR).log() - step, -1)
    return keep * stored - step
