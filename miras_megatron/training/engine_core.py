"""The engine of megatron-core: its DDP, and its AdamW with whole or (optimizer.distributed) shared moments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..config.schema import Run
from ..model.language_model import MemoryLanguageModel
from ..parallel.mesh import ParallelMesh
from .moments import find_places
from .optimizer import (
    clip_and_update,
    gradient_norm,
    make_moments,
    make_optimizer,
    moment_tensors,
    put_moments,
    set_rates,
    updates_done,
    wrap_model,
)


class CoreEngine:
    """See `engine.Engine`.

    model      the bare model under megatron-core's DDP
    optimizer  megatron-core's
    """

    def __init__(self, run: Run, model: MemoryLanguageModel, mesh: ParallelMesh):
        self._run, self._bare, self._mesh = run, model, mesh
        self.model = wrap_model(model, model.config, distributed=run.optimizer.distributed)
        self.optimizer = make_optimizer(run, self.model, model.config)

    def begin_step(self, lr: float) -> None:
        set_rates(self.optimizer, lr, self._run.optimizer)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def gradient_norm(self) -> float:
        return gradient_norm(self.optimizer)

    def update(self, norm: float) -> None:
        clip_and_update(self.optimizer, norm, self._run.optimizer.clip)

    def own_gradients(self) -> Iterator[tuple[Any, Tensor]]:
        """Data- and context-parallel ranks hold the same sums; with optimizer.distributed each those of its part."""
        weights, first = self._bare.sharded_state_dict().values(), self._mesh.groups.dp_cp.rank() == 0
        places = find_places(self.optimizer, [sharded.data for sharded in weights])
        for sharded in weights:
            place = places.get(id(sharded.data))
            if place is not None and (first or place.spans is not None):
                yield sharded, place.own_gradient(sharded.data.main_grad)

    def updates(self) -> int:
        return updates_done(self.optimizer)

    def state(self) -> dict[str, Any]:
        weights = self.weights()
        return {"weights": weights, "moments": moment_tensors(self.optimizer, weights)}

    def room_for_state(self) -> dict[str, Any]:
        make_moments(self.optimizer)
        return self.state()

    def put_state(self, stored: dict[str, Any], updates: int) -> None:
        put_weights(self._bare, stored["weights"])
        put_moments(self.optimizer, self._bare.sharded_state_dict(), stored["moments"], updates)

    def weights(self) -> dict[str, Any]:
        found: dict[str, Any] = self._bare.sharded_state_dict()
        return found

    def put_weights(self, weights: dict[str, Tensor]) -> None:
        put_weights(self._bare, weights)
        self.optimizer.reload_model_params()

    def close(self) -> None:
        """Nothing is held."""


@torch.no_grad()
def put_weights(model: nn.Module, stored: dict[str, Tensor]) -> None:
    """Copy what was read into the parameters; megatron's empty extra states have no tensor and are not among it."""
    unexpected = model.load_state_dict(stored, strict=False).unexpected_keys
    assert not unexpected, f"the model has no {unexpected[0]}"
