"""What ZeRO shares out as a checkpoint knows it: whole weights and moments, under the names that any layout reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from torch import Tensor

from ..model.language_model import MemoryLanguageModel
from ..parallel.mesh import ParallelMesh
from ..parallel.shares import collect_parts, deal_parts, keepers_of, room_for
from ..parallel.zero_parts import Part, ZeroModel
from .engine_core import put_weights
from .optimizer import MOMENTS
from .signs import alive

Whole = Callable[[Part, Tensor, int], Tensor | None]
"""(weight, this rank's part, keeper) -> the whole tensor on its keeper."""


class ZeroState:
    """Of one rank. All methods are collective calls, and give a sign of life a tensor."""

    def __init__(self, zero: ZeroModel, model: MemoryLanguageModel, mesh: ParallelMesh) -> None:
        self.zero, self._bare, self._device = zero, model, mesh.device

    def collect(self) -> dict[str, Any]:
        """Weights and moments, each on one rank, which writes it."""
        return {"weights": self._weights(self._collected), "moments": self._moments(self._collected)}

    def room(self) -> dict[str, Any]:
        """The same to be read into."""
        return {"weights": self.room_for_weights(), "moments": self._moments(self._room)}

    def room_for_weights(self) -> dict[str, Any]:
        """The weights alone, to be read into."""
        return self._weights(self._room)

    @torch.no_grad()
    def put(self, stored: dict[str, Any], make_step: Callable[[], Any]) -> None:
        """Go on from what was read into `room`.

        make_step  makes the number of updates as AdamW keeps it, once for each of its tensors
        """
        moments = stored.get("moments", {})  # core leaves out what is empty: a rank may have read nothing
        self._put_weights(stored.get("weights", {}))
        self._set_masters(low_too=False)  # of bf16 weights they were read, some into their very place
        for kind in MOMENTS:
            self._deal(moments, f"/{kind}", self.zero.state(kind))
        self._deal(moments, "/master", self.zero.masters, low_only=True)
        for entry in self.zero.adam.state.values():
            entry["step"] = make_step()

    @torch.no_grad()
    def put_weights(self, weights: dict[str, Tensor]) -> None:
        """Start from what was read into `room_for_weights`."""
        self._put_weights(weights)
        self._set_masters(low_too=True)

    def placed(self, low_only: bool = False) -> list[tuple[str, Any, Part]]:
        """(name, its place in a checkpoint, part) of every trained weight, in one order on all ranks that share it.

        low_only  only those in bf16
        Raises ValueError where a trained weight has no name.
        """
        parts = {id(part.weight): part for part in self.zero.parts}
        found = [(name, place, parts.pop(id(place.data), None)) for name, place in self._named().items()]
        if parts:
            raise ValueError(
                f"{len(parts)} trained parameters are not in the model's sharded state: they can't be saved"
            )
        trained = [(name, place, part) for name, place, part in found if part is not None]
        return [entry for entry in trained if not low_only or entry[2].weight.dtype != torch.float32]

    def _named(self) -> dict[str, Any]:
        with self.zero.whole_shapes():
            named: dict[str, Any] = self._bare.sharded_state_dict()
        return named

    # -- whole tensors -----------------------------------------------------------------------------
    def _collected(self, part: Part, here: Tensor, keeper: int) -> Tensor | None:
        return collect_parts(here, part.spans, self.zero.group, part.shape, keeper=keeper, device=self._device)

    def _room(self, part: Part, here: Tensor, keeper: int) -> Tensor | None:
        return room_for(here, part.spans, self.zero.group, part.shape, keeper)

    def _weights(self, make: Whole) -> dict[str, Any]:
        if self.zero.shards is None:
            return self._named()
        return {name: replace(place, data=whole) for name, place, whole in self._wholes(self.zero.shards, make)}

    def _moments(self, make: Whole) -> dict[str, Any]:
        """ShardedTensors of both moments of every weight, and of the fp32 master of every bf16 one."""
        kinds = {name: self.zero.state(name) for name in MOMENTS} | {"master": self.zero.masters}
        return {
            f"{name}/{kind}": make_sharded_optimizer_tensor(place, whole, f"optimizer.{kind}")
            for kind, flats in kinds.items()
            for name, place, whole in self._wholes(flats, make, low_only=kind == "master")
        }

    def _wholes(self, flats: list[Tensor], make: Whole, low_only: bool = False) -> Iterator[tuple[str, Any, Tensor]]:
        """(name, its place, the whole tensor) of those that this rank keeps of all ranks' `flats`."""
        for name, place, part, keeper in self._kept(low_only):
            whole = make(part, self._part(part, flats).detach(), keeper)
            if whole is not None:
                replica = (*place.replica_id[:-1], 0) if len(part.spans) > 1 else place.replica_id
                yield name, replace(place, replica_id=replica, data=None), whole

    def _deal(self, stored: dict[str, Tensor], suffix: str, flats: list[Tensor], *, low_only: bool = False) -> None:
        """Hand out to all ranks' `flats` what each rank read."""
        for name, _, part, keeper in self._kept(low_only):
            whole, values = stored.get(name + suffix), self._part(part, flats)
            deal_parts(whole, values, part.spans, self.zero.group, keeper=keeper, device=self._device)

    def _kept(self, low_only: bool) -> Iterator[tuple[str, Any, Part, int]]:
        """`placed`, and who keeps each."""
        placed = self.placed(low_only)
        keepers = keepers_of(part.spans for _, _, part in placed)
        for (name, place, part), keeper in zip(placed, keepers, strict=True):
            alive()
            yield name, place, part, keeper

    def _part(self, part: Part, flats: list[Tensor]) -> Tensor:
        """This rank's, of no length where it has none."""
        values = part.of(flats, self.zero.rank)
        return flats[part.flat].new_empty(0) if values is None else values

    def _put_weights(self, weights: dict[str, Tensor]) -> None:
        if self.zero.shards is None:
            put_weights(self._bare, weights)
        else:
            self.zero.give_away()
            self._deal(weights, "", self.zero.shards)

    def _set_masters(self, low_too: bool) -> None:
        """Make masters the weights, those of bf16 weights only where `low_too`."""
        shards = self.zero.shards
        for part, master in self.zero.own(self.zero.masters):
            start, end = part.spans[self.zero.rank]
            if low_too or part.weight.dtype == torch.float32:
                master.copy_(part.weight.view(-1)[start:end] if shards is None else self._part(part, shards))
