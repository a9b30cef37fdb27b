"""Comparing tensors: one assertion that names what is wrong and where, and never lets a failure pass as a warning."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_close(name: str, got: Tensor, want: Tensor, rtol: float, floor: float = 0.0) -> None:
    """Fail unless every |got - want| is at most rtol * max(largest |want|, floor).

    The error is relative to the largest entry, since that is what rounding in a sum is relative to. NaN and
    infinities never pass. `floor` is for tensors that are 0 but for rounding.
    """
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, wanted {tuple(want.shape)}"
    if want.numel() == 0:
        return
    got, want = got.detach().cpu(), want.detach().cpu()
    assert bool(torch.isfinite(want).all()), (
        f"{name}: what it is compared with isn't finite at {_where(~torch.isfinite(want))}"
    )
    assert bool(torch.isfinite(got).all()), (
        f"{name}: {got[_where(~torch.isfinite(got))]} at {_where(~torch.isfinite(got))}"
    )
    error = (got.double() - want.double()).abs()
    scale = max(float(want.double().abs().max()), floor)
    worst, wrong = _where(error == error.max()), int((error > rtol * scale).sum())
    assert wrong == 0, (
        f"{name}: off by {float(error.max()):.3g} at {worst}: got {float(got[worst]):.9g}, wanted "
        f"{float(want[worst]):.9g}; allowed {rtol:g} of {scale:.3g} ({wrong} of {error.numel()} entries are off)"
    )


def _where(mask: Tensor) -> tuple[int, ...]:
    """Index of the first True."""
    return tuple(int(i) for i in mask.nonzero()[0])
