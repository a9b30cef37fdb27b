"""The projections of a layer come from a factory, so that layers know nothing of ranks.

A rank of `shards` holds `heads / shards` heads. Everything a head owns is drawn for all heads from one
generator and then cut, so that one and two ranks make the same model.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

PERSISTENT_STD = 0.02

Split = Literal["column", "row", "replicated"]


class LinearFactory(Protocol):
    """Makes projections without bias, for the ranks that share a layer's heads.

    make      nn.Module that maps [B, T, in] to [B, T, out]; in_features and out_features are those of all ranks
        column      whole in, this rank's part of out (columns are packed per head, so that equal parts are
                    whole heads); sums its input's gradient over ranks itself
        row         this rank's part of in, whole out: sums over ranks
        replicated  whole in, whole out, the same weight on every rank
    gather    [..., this rank's columns] -> [..., all columns]: rank after rank; backward keeps this rank's part
    """

    shards: int
    index: int

    def make(self, in_features: int, out_features: int, *, split: Split, std: float) -> nn.Module: ...

    def gather(self, x: Tensor) -> Tensor: ...


class Projection(nn.Linear):
    """x [..., in] -> [..., out] in the weight's dtype: a gate's is float32 where the stream is bf16."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x.to(self.weight.dtype), self.weight)


class PlainLinear:
    """One rank holds all."""

    shards = 1
    index = 0

    def __init__(self, generator: torch.Generator | None = None):
        self.generator = generator

    def make(self, in_features: int, out_features: int, *, split: Split, std: float) -> nn.Module:
        """A projection whose weight is normal with standard deviation `std`."""
        made = Projection(in_features, out_features, bias=False)
        with torch.no_grad():
            made.weight.normal_(0.0, std, generator=self.generator)
        return made

    def gather(self, x: Tensor) -> Tensor:
        """All columns are here."""
        return x


def own_heads(full: Tensor, factory: LinearFactory) -> nn.Parameter:
    """This rank's part of a tensor whose dim 0 are all heads (or channels packed per head).

    `split_dim` says along which dim ranks share it, `no_weight_decay` that it is no matrix to decay.
    """
    parameter = nn.Parameter(full.chunk(factory.shards, dim=0)[factory.index].clone())
    return _mark(parameter, split_dim=0)


def shared(full: Tensor) -> nn.Parameter:
    """A parameter that every rank holds whole."""
    return _mark(nn.Parameter(full), split_dim=None)


def persistent_rows(count: int, width: int, generator: torch.Generator) -> nn.Parameter:
    """[count, width] learned rows that attention always sees, the same on every rank (rules 1.5)."""
    return shared(torch.empty(count, width).normal_(0.0, PERSISTENT_STD, generator=generator))


def without_decay(projection: nn.Module) -> nn.Module:
    """The same projection, its weight taken out of weight decay (gates)."""
    for parameter in projection.parameters():
        parameter.no_weight_decay = True  # type: ignore[attr-defined]
    return projection


def _mark(parameter: nn.Parameter, split_dim: int | None) -> nn.Parameter:
    parameter.split_dim = split_dim  # type: ignore[attr-defined]
    parameter.no_weight_decay = True  # type: ignore[attr-defined]
    return parameter
