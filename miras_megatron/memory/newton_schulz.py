"""NS5: five Newton-Schulz steps towards the orthogonal factor of a matrix (ATLAS; Muon's coefficients)."""

from __future__ import annotations

from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
NORM_EPS = 1e-7


def newton_schulz(matrix: Tensor) -> Tensor:
    """Orthogonalise [..., out, in]: X = M / ||M||_F, then X <- a X + (b A + c A A) X with A = X X^T, five times."""
    wide = matrix.shape[-2] <= matrix.shape[-1]
    x = matrix if wide else matrix.transpose(-1, -2)
    x = x / x.square().sum((-2, -1), keepdim=True).sqrt().clamp_min(NORM_EPS)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.transpose(-1, -2)
