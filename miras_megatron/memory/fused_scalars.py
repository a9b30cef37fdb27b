"""The gates' part of the hand-written scan: b, f, G and the end weights of many tiles at once, and their gradient.

A matrix's state is r stacked matrices, [W; S] with momentum (r = 2) and [W] without (r = 1), so that a tile is
    z_t = sum_r read[t, r] R_r h_t + sum_i G[t, i] V_i (X_i . h_t)          R' = carry R + [end_0 . V | end_1 . V]^T X
With P_a, P_m the products of keep and momentum (gate_products), index 0 the start, everything is c x c or smaller:
    B = P_a[1:, 1:] P_m[1:, :]      b = P_a[1:, 0]      f = B[:, 0]      G = B[:, 1:] diag(r)
    read = (b, f)      carry = ((b_c, f_c), (0, e_c)) with e = P_m[:, 0]      end = (G[c, :], P_m[c, 1:] r)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .gate_products import gate_gradient, log_products


@dataclass
class TileScalars:
    """One matrix's weights in one tile: read [n, c, r], write G [n, c, c], carry [n, r, r], end [n, c, r].

    The same fields hold their gradients; n = batch x heads.
    """

    read: Tensor
    write: Tensor
    carry: Tensor
    end: Tensor


@dataclass
class Scalars:
    """The fields of TileScalars for J tiles, [n, J, ...], and what they came from.

    keeps, momenta: products of gates [n, J, c+1, c+1], momenta None without momentum; lr [n, J, c]
    """

    read: Tensor
    write: Tensor
    carry: Tensor
    end: Tensor
    keeps: Tensor
    momenta: Tensor | None
    lr: Tensor

    def tiles(self) -> list[TileScalars]:
        """The weights of each tile."""
        fields = (self.read.unbind(1), self.write.unbind(1), self.carry.unbind(1), self.end.unbind(1))
        return [TileScalars(*one) for one in zip(*fields, strict=True)]


def tile_scalars(log_keep: Tensor | None, momentum: Tensor | None, lr: Tensor) -> Scalars:
    """Scalars of J tiles from gates [n, J, c]; log_keep None keeps everything, momentum None has none."""
    size = lr.shape[-1] + 1
    keeps = lr.new_ones(*lr.shape[:2], size, size).tril_() if log_keep is None else log_products(log_keep)
    inner, keep = keeps[..., 1:, 1:], keeps[..., 1:, 0]
    if momentum is None:
        write = inner * lr.unsqueeze(-2)
        read = keep.unsqueeze(-1)
        return Scalars(read, write, read[..., -1:, :], write[..., -1, :, None], keeps, None, lr)
    momenta = log_products(momentum.log())
    both = inner @ momenta[..., 1:, :]
    write = both[..., 1:] * lr.unsqueeze(-2)
    read = torch.stack((keep, both[..., 0]), -1)
    left = momenta[..., -1, 0]
    last = torch.stack((torch.zeros_like(left), left), -1)
    end = torch.stack((write[..., -1, :], momenta[..., -1, 1:] * lr), -1)
    return Scalars(read, write, torch.stack((read[..., -1, :], last), -2), end, keeps, momenta, lr)


def scalars_backward(scalars: Scalars, grads: list[TileScalars]) -> tuple[Tensor, Tensor | None, Tensor]:
    """(dlog_keep, dmomentum, dlr) [n, J, c] from the gradients of each tile's weights."""
    dread, dwrite = torch.stack([g.read for g in grads], 1), torch.stack([g.write for g in grads], 1)
    dcarry, dend = torch.stack([g.carry for g in grads], 1), torch.stack([g.end for g in grads], 1)
    dread[..., -1, :] += dcarry[..., 0, :]
    dwrite[..., -1, :] += dend[..., 0]
    inner, momenta, lr = scalars.keeps[..., 1:, 1:], scalars.momenta, scalars.lr.unsqueeze(-2)
    dkeeps = torch.zeros_like(scalars.keeps)
    dkeeps[..., 1:, 0] = dread[..., 0]
    if momenta is None:
        dkeeps[..., 1:, 1:] = dwrite * lr
        return _log_gradient(scalars.keeps, dkeeps), None, (dwrite * inner).sum(-2)
    dboth = torch.cat([dread[..., 1:], dwrite * lr], -1)
    dkeeps[..., 1:, 1:] = dboth @ momenta[..., 1:, :].mT
    dmomenta = torch.zeros_like(momenta)
    dmomenta[..., 1:, :] = inner.mT @ dboth
    dmomenta[..., -1, 0] += dcarry[..., 1, 1]
    dmomenta[..., -1, 1:] += dend[..., 1] * scalars.lr
    dlr = (dwrite * (inner @ momenta[..., 1:, 1:])).sum(-2) + dend[..., 1] * momenta[..., -1, 1:]
    return _log_gradient(scalars.keeps, dkeeps), gate_gradient(momenta, dmomenta), dlr


def _log_gradient(products: Tensor, grad: Tensor) -> Tensor:
    return gate_gradient(products, grad) * products.diagonal(offset=-1, dim1=-2, dim2=-1)
