"""How steep the inner loss is: the largest Gauss-Newton eigenvalue of a chunk, which bounds the inner rate.

With gradients at the chunk's first weights a chunk is one step of gradient descent of rate r on sum_j l(W; k_j):
stable while r < 2 (1 - m) / lambda, m the momentum. For a plain matrix and unit keys lambda <= C. A layer norm makes
it far larger, since it divides by the small spread of its input (rules 1.10 and 12.5, deep_memory 8).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .features import polynomial_features
from .network import SlowNorm, apply_weights, read_network
from .retention import link
from .rules import Rule


@torch.enable_grad()
def chunk_curvature(rule: Rule, params: dict[str, Tensor], keys: Tensor, steps: int = 30) -> Tensor:
    """lambda_max of sum_j J_j^T J_j, J_j = d net(k_j) / d W, at the rule's start weights, by power iteration.

    keys [C, N, D]: one chunk for each head; returns [N] float64
    """
    params = {name: x.detach().double() for name, x in params.items()}
    key = keys.double().transpose(0, 1)[None]
    if rule.degree > 1:
        key = polynomial_features(key, params["coefficients"])
    weights = [link(rule, w[None]).requires_grad_() for w in rule.start_weights(params)]
    out = read_network(rule.depth, SlowNorm.of(params, torch.float64), apply_weights(weights), key)
    probe = torch.zeros_like(out).requires_grad_()
    pulled = torch.autograd.grad(out, weights, probe, create_graph=True)
    vector = [torch.randn(w.shape, generator=torch.Generator().manual_seed(0), dtype=w.dtype) for w in weights]
    for _ in range(steps):
        size = _norm(vector)
        vector = [v / size[None, :, None, None] for v in vector]
        (pushed,) = torch.autograd.grad(pulled, probe, vector, retain_graph=True)
        vector = list(torch.autograd.grad(out, weights, pushed, retain_graph=True))
    return _norm(vector)


def _norm(vector: list[Tensor]) -> Tensor:
    """[N], over all matrices of a head; each [1, N, out, in]."""
    return torch.stack([v.square().sum((0, 2, 3)) for v in vector]).sum(0).sqrt()


def stable_rate(curvature: float, momentum: float = 0.0) -> float:
    """The inner rate at the edge of stability, 2 (1 - m) / lambda."""
    return 2.0 * (1.0 - momentum) / curvature
