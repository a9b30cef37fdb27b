"""The matmul form of one tile (dual form): reads and end state without a matrix per token.

    Z = diag(b) B W_0^T + diag(f) B S_0^T - (G * (B A^T)) U            rows are tokens, * elementwise
for a matrix with inner gradients u_j = U_j A_j^T. Channel gates act on rows (they scale columns of Z) or on
columns (they scale columns of B and A); then G has one slice per channel. Differentiable by autograd.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .tile import TileWeights


def apply_running(
    side: str | None, scalars: TileWeights, weight: Tensor, momentum: Tensor | None, errors: Tensor, inputs: Tensor
) -> Callable[[Tensor], Tensor]:
    """h [B, N, T, in] -> rows W_t h_t [B, N, T, out] with the running weights of every token.

    weight, momentum [B, N, out, in] at the tile's start; errors U [B, N, T', out]; inputs A [B, N, T', in]
    """

    def apply(h: Tensor) -> Tensor:
        z = _scaled(side, scalars.keep, h, weight) - _written(side, scalars.write, h, errors, inputs)
        if momentum is None or scalars.start is None:
            return z
        return z + _scaled(side, scalars.start, h, momentum)

    return apply


def _scaled(side: str | None, scale: Tensor, h: Tensor, matrix: Tensor) -> Tensor:
    """diag(scale) h M^T, the scale [B, N, Ch, T] acting on M's columns or rows."""
    by_token = scale.transpose(-1, -2)
    if side == "columns":
        return (h * by_token) @ matrix.transpose(-1, -2)
    return by_token * (h @ matrix.transpose(-1, -2))


def _written(side: str | None, write: Tensor, h: Tensor, errors: Tensor, inputs: Tensor) -> Tensor:
    """sum_j G[t, j] (A_j . h_t) U_j."""
    if write.shape[2] == 1:
        return (write[:, :, 0] * (h @ inputs.transpose(-1, -2))) @ errors
    if side == "columns":
        return torch.einsum("bnitj,bnti,bnji->bntj", write, h, inputs) @ errors
    return torch.einsum("bnotj,bntj,bnjo->bnto", write, h @ inputs.transpose(-1, -2), errors)


def decayed(side: str | None, keep: Tensor, matrix: Tensor) -> Tensor:
    """A gate [B, N, Ch] on the rows or columns of [B, N, out, in]."""
    return matrix * (keep.unsqueeze(-2) if side == "columns" else keep.unsqueeze(-1))


def weighted_sum(side: str | None, weights: Tensor, errors: Tensor, inputs: Tensor) -> Tensor:
    """sum_j w_j U_j A_j^T: weights [B, N, Ch, T'] -> [B, N, out, in]."""
    by_token = weights.transpose(-1, -2)
    if side == "columns":
        return errors.transpose(-1, -2) @ (inputs * by_token)
    return (errors * by_token).transpose(-1, -2) @ inputs


def end_of_tile(
    side: str | None, scalars: TileWeights, weight: Tensor, momentum: Tensor | None, errors: Tensor, inputs: Tensor
) -> tuple[Tensor, Tensor | None]:
    """W and S after the tile's last token."""
    end = decayed(side, scalars.keep[..., -1], weight)
    end = end - weighted_sum(side, scalars.write[..., -1, :], errors, inputs)
    if momentum is None or scalars.start is None or scalars.momentum_keep is None or scalars.momentum_write is None:
        return end, None
    end = end + decayed(side, scalars.start[..., -1], momentum)
    left = decayed(side, scalars.momentum_keep, momentum)
    return end, left - weighted_sum(side, scalars.momentum_write, errors, inputs)


def exact_errors(
    side: str | None, products: Tensor, lr: Tensor, decayed_first: bool, weight: Tensor, key: Tensor, target: Tensor
) -> Tensor:
    """Errors of the exact delta rule: e_t = W' k_t - v_t with W' = W_{t-1}, or a_t W_{t-1} where `decayed_first`.

    Each depends on the tile's earlier ones: a unit lower-triangular system (the WY form). products
    [B, N, Ch, T+1, T+1] of the keep gate, lr [B, N, Ch, T], key [B, N, T, in], target [B, N, T, out].
    """
    rows = products[..., 1:, :] if decayed_first else products[..., :-1, :]
    start, between = rows[..., 0], (rows[..., 1:] * lr.unsqueeze(-2)).tril(-1)
    free = _scaled(side, start, key, weight) - target
    if between.shape[2] == 1:
        system = between[:, :, 0] * (key @ key.transpose(-1, -2))
    elif side == "columns":
        system = torch.einsum("bnitj,bnti,bnji->bntj", between, key, key)
    else:
        system = between * (key @ key.transpose(-1, -2)).unsqueeze(2)
        return _solve(system, free.transpose(-1, -2).unsqueeze(-1)).squeeze(-1).transpose(-1, -2)
    return _solve(system, free)


def _solve(below: Tensor, right: Tensor) -> Tensor:
    """x of (I + below) x = right, below strictly lower triangular."""
    return torch.linalg.solve_triangular(below, right, upper=False, unitriangular=True)
