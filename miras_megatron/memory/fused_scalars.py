"""The gates' part of the hand-written scan: b, f, G and the end weights of many tiles at once, and their gradient.

A matrix's state is r stacked matrices, [W; S] with momentum (r = 2) and [W] without (r = 1), so that a tile is
    z_t = sum_r read[t, r] R_r h_t + sum_i G[t, i] V_i (X_i . h_t)          R' = carry R + [end_0 . V | end_1 . V]^T X
With P_a, P_m the products of keep and momentum (gate_products), index 0 the start, everything is c x c or smaller:
    b = P_a[1:, 0]      f = P_a[1:, 1:] P_m[1:, 0]      G = P_a[1:, 1:] P_m[1:, 1:] diag(r)
    read = (b, f)      carry = ((b_c, f_c), (0, e_c)) with e = P_m[:, 0]      end = (G[c, :], P_m[c, 1:] r)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .gate_products import LEAST, LOG_FLOOR


@dataclass
class TileScalars:
    """One matrix's weights in one tile: read [n, c, r], write G [n, c, c], carry [n, r, r], end [n, c, r].

    The same fields hold their gradients; n = batch x heads.
    """

    read: Tensor
    write: Tensor
    carry: Tensor
    end: Tensor

    def tiles(self) -> list[TileScalars]:
        """Views of each tile's, where the fields are those of J tiles, [n, J, ...]."""
        fields = (self.read.unbind(1), self.write.unbind(1), self.carry.unbind(1), self.end.unbind(1))
        return [TileScalars(*one) for one in zip(*fields, strict=True)]

    def blank(self) -> TileScalars:
        """Room for the gradients of the fields."""
        return TileScalars(*(torch.empty_like(x) for x in (self.read, self.write, self.carry, self.end)))


@dataclass
class Products:
    """Products of one gate in m tiles: start[t] = P[t, 0] [m, c] and within[t, j] = P[t, j] [m, c, c], t, j >= 1."""

    start: Tensor
    within: Tensor

    @classmethod
    def of(cls, log_gate: Tensor) -> Products:
        """From logs [m, c]. Sums are differences of float64 running sums, so float32 loses nothing by them."""
        floor, dtype = LOG_FLOOR[log_gate.dtype], log_gate.dtype
        # a gate of 0 is one below the floor
        sums = log_gate.clamp_min(2.0 * floor).double().cumsum(-1)
        # above the diagonal logs are those of quotients, which may be infinite
        between = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).to(dtype).tril_().clamp_min_(floor)
        return cls(_flushed(sums.to(dtype).clamp_min_(floor)), _flushed(between).mul_(_lower(between)))

    def gate_gradient(self, dstart: Tensor, dwithin: Tensor) -> Tensor:
        """dl/da_t [m, c]: the subdiagonal of P^T dP P^T; what dwithin holds above its diagonal is not read."""
        inner = torch.bmm(dwithin, self.within.mT).addcmul_(dstart.unsqueeze(-1), self.start.unsqueeze(-2))
        first = (self.within[..., :1] * dstart.unsqueeze(-1)).sum(1)
        return torch.cat([first, (self.within[..., 1:] * inner[..., :-1]).sum(1)], -1)

    def log_gradient(self, dstart: Tensor, dwithin: Tensor) -> Tensor:
        """dl/dlog a_t = dl/da_t a_t."""
        gates = torch.cat([self.start[:, :1], self.within.diagonal(-1, 1, 2)], -1)
        return self.gate_gradient(dstart, dwithin).mul_(gates)


def _flushed(logs: Tensor) -> Tensor:
    """exp, and 0 at the floor: subnormal numbers would slow every product that meets them tenfold."""
    return torch.threshold_(logs.exp_(), LEAST[logs.dtype], 0.0)


def _lower(like: Tensor) -> Tensor:
    return like.new_ones(like.shape[-2:]).tril_()


@dataclass
class Scalars(TileScalars):
    """The fields of TileScalars for J tiles, [n, J, ...], and what they came from, with m = n x J.

    momenta None without momentum; lr [m, c]
    """

    keeps: Products
    momenta: Products | None
    lr: Tensor


def tile_scalars(log_keep: Tensor | None, momentum: Tensor | None, lr: Tensor) -> Scalars:
    """Scalars of J tiles from gates [n, J, c]; log_keep None keeps everything, momentum None has none."""
    shape, rate = lr.shape[:2], lr.flatten(0, 1)
    keeps = Products.of(torch.zeros_like(rate) if log_keep is None else log_keep.flatten(0, 1))
    momenta, starts = None, [keeps.start]
    if momentum is not None:
        momenta = Products.of(momentum.flatten(0, 1).log())
        starts.append(torch.bmm(keeps.within, momenta.start.unsqueeze(-1)).squeeze(-1))
    write, read = _both(keeps, momenta) * rate.unsqueeze(-2), torch.stack(starts, -1)
    carry, end = read[:, -1:], write[:, -1].unsqueeze(-1)
    if momenta is not None:
        left = momenta.start[:, -1:]
        carry = torch.stack((carry[:, 0], torch.cat([torch.zeros_like(left), left], -1)), 1)
        end = torch.cat([end, (momenta.within[:, -1] * rate).unsqueeze(-1)], -1)
    read, write, carry, end = (x.unflatten(0, shape) for x in (read, write, carry, end))
    return Scalars(read, write, carry, end, keeps, momenta, rate)


def _both(keeps: Products, momenta: Products | None) -> Tensor:
    """P_a P_m within the tiles [m, c, c], P_a without momentum."""
    return keeps.within if momenta is None else torch.bmm(keeps.within, momenta.within)


def scalars_backward(scalars: Scalars, grads: TileScalars) -> tuple[Tensor, Tensor | None, Tensor]:
    """(dlog_keep, dmomentum, dlr) [n, J, c] from the gradients of J tiles' weights [n, J, ...] (consumed)."""
    shape = grads.read.shape[:2]
    dread, dwrite, dcarry, dend = (x.flatten(0, 1) for x in (grads.read, grads.write, grads.carry, grads.end))
    dread[:, -1] += dcarry[:, 0]
    dwrite[:, -1] += dend[..., 0]
    keeps, momenta = scalars.keeps, scalars.momenta
    # both is computed again: kept for every tile of a span it would be the larger cost
    dlr, dboth = (dwrite * _both(keeps, momenta)).sum(1), dwrite.mul_(scalars.lr.unsqueeze(-2))
    if momenta is None:
        return keeps.log_gradient(dread[..., 0], dboth).unflatten(0, shape), None, dlr.unflatten(0, shape)
    dlr += dend[..., 1] * momenta.within[:, -1]
    dkeep = torch.bmm(dboth, momenta.within.mT).addcmul_(dread[..., 1:], momenta.start.unsqueeze(-2))
    dmomentum = torch.bmm(keeps.within.mT, dboth)
    dmomentum[:, -1] += dend[..., 1] * scalars.lr
    dstart = torch.bmm(keeps.within.mT, dread[..., 1:]).squeeze(-1)
    dstart[:, -1] += dcarry[:, 1, 1]
    found = keeps.log_gradient(dread[..., 0], dkeep), momenta.gate_gradient(dstart, dmomentum), dlr
    return found[0].unflatten(0, shape), found[1].unflatten(0, shape), dlr.unflatten(0, shape)
