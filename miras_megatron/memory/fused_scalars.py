"""The gates' part of the hand-written scan: b, f, G and the end weights of many tiles at once, and their gradient.

Everything is c x c or smaller. With P_a, P_m the products of keep and momentum (gate_products), index 0 the start:
    B = P_a[1:, 1:] P_m[1:, :]      f = B[:, 0]      G = B[:, 1:] diag(r)      n = P_m[c, 1:] r
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .gate_products import gate_gradient, log_products


@dataclass
class Scalars:
    """One matrix's weights of J tiles of c tokens, [n, J, ...], n = batch x heads.

    keep b [n, J, c]; start f [n, J, c]; write G [n, J, c, c]; momentum_keep e_c [n, J]; momentum_write n [n, J, c]
    keeps, momenta: the products they came from, [n, J, c+1, c+1]; momenta None without momentum
    """

    keep: Tensor
    start: Tensor | None
    write: Tensor
    momentum_keep: Tensor | None
    momentum_write: Tensor | None
    keeps: Tensor
    momenta: Tensor | None
    lr: Tensor

    def tile(self, j: int) -> TileScalars:
        """The weights of tile j, rows as columns [n, c, 1] where they scale tokens."""

        def column(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[:, j].unsqueeze(-1)

        keep = column(self.keep)
        assert keep is not None
        end = None if self.momentum_keep is None else self.momentum_keep[:, j, None, None]
        return TileScalars(keep, column(self.start), self.write[:, j], end, column(self.momentum_write))


@dataclass
class TileScalars:
    """b, f [n, c, 1], G [n, c, c], e_c [n, 1, 1], n [n, c, 1] of one tile; the same fields hold their gradients."""

    keep: Tensor
    start: Tensor | None
    write: Tensor
    momentum_keep: Tensor | None
    momentum_write: Tensor | None


def tile_scalars(log_keep: Tensor | None, momentum: Tensor | None, lr: Tensor) -> Scalars:
    """Scalars of J tiles from gates [n, J, c]; log_keep None keeps everything, momentum None has none."""
    size = lr.shape[-1] + 1
    keeps = lr.new_ones(*lr.shape[:2], size, size).tril_() if log_keep is None else log_products(log_keep)
    inner = keeps[..., 1:, 1:]
    if momentum is None:
        return Scalars(keeps[..., 1:, 0], None, inner * lr.unsqueeze(-2), None, None, keeps, None, lr)
    momenta = log_products(momentum.log())
    both = inner @ momenta[..., 1:, :]
    end = momenta[..., -1, :]
    write = both[..., 1:] * lr.unsqueeze(-2)
    return Scalars(keeps[..., 1:, 0], both[..., 0], write, end[..., 0], end[..., 1:] * lr, keeps, momenta, lr)


def scalars_backward(scalars: Scalars, grads: list[TileScalars]) -> tuple[Tensor, Tensor | None, Tensor]:
    """(dlog_keep, dmomentum, dlr) [n, J, c] from the gradients of each tile's weights."""
    dkeep = torch.stack([g.keep.squeeze(-1) for g in grads], 1)
    dwrite = torch.stack([g.write for g in grads], 1)
    inner, momenta, lr = scalars.keeps[..., 1:, 1:], scalars.momenta, scalars.lr.unsqueeze(-2)
    dkeeps = torch.zeros_like(scalars.keeps)
    dkeeps[..., 1:, 0] = dkeep
    if momenta is None:
        dkeeps[..., 1:, 1:] = dwrite * lr
        return _log_gradient(scalars.keeps, dkeeps), None, (dwrite * inner).sum(-2)
    dstart = torch.stack([g.start.squeeze(-1) for g in grads if g.start is not None], 1)
    dend = torch.stack([g.momentum_keep[:, 0, 0] for g in grads if g.momentum_keep is not None], 1)
    dlast = torch.stack([g.momentum_write.squeeze(-1) for g in grads if g.momentum_write is not None], 1)
    dboth = torch.cat([dstart.unsqueeze(-1), dwrite * lr], -1)
    dkeeps[..., 1:, 1:] = dboth @ momenta[..., 1:, :].transpose(-1, -2)
    dmomenta = torch.zeros_like(momenta)
    dmomenta[..., 1:, :] = inner.transpose(-1, -2) @ dboth
    dmomenta[..., -1, 1:] += dlast * scalars.lr
    dmomenta[..., -1, 0] += dend
    dlr = (dwrite * (inner @ momenta[..., 1:, 1:])).sum(-2) + dlast * momenta[..., -1, 1:]
    return _log_gradient(scalars.keeps, dkeeps), gate_gradient(momenta, dmomenta), dlr


def _log_gradient(products: Tensor, grad: Tensor) -> Tensor:
    return gate_gradient(products, grad) * products.diagonal(offset=-1, dim1=-2, dim2=-1)
