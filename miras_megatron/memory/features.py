"""Polynomial features of keys and queries (ATLAS): all monomials up to a degree, with Taylor coefficients."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def polynomial_features(x: Tensor, coefficients: Tensor) -> Tensor:
    """phi(x): monomials of degree 0..p, those of degree i times coefficient i.

    x            [B, N, T, D]
    coefficients [N, p+1], learnable, started at 1/i!
    returns      [B, N, T, binom(D+p, p)], the constant first, then combinations with replacement in
                 lexical order, degree by degree
    """
    blocks = [torch.ones_like(x[..., :1])]
    for degree in range(1, coefficients.shape[-1]):
        index = torch.tensor(list(itertools.combinations_with_replacement(range(x.shape[-1]), degree)), device=x.device)
        monomials = x[..., index[:, 0]]
        for column in range(1, degree):
            monomials = monomials * x[..., index[:, column]]
        blocks.append(monomials)
    scale = coefficients.to(x.dtype)[:, None, :, None]
    return torch.cat([block * scale[:, :, i] for i, block in enumerate(blocks)], dim=-1)
