"""What trains a model: who sums its gradients over ranks, keeps AdamW's moments and masters, and updates the weights.

A new engine is one file with a class of this form and one line of ENGINES.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor, nn

from ..config.schema import Run
from ..model.language_model import MemoryLanguageModel
from ..parallel.mesh import ParallelMesh
from ..parallel.zero import refuse_without_deepspeed
from .engine_core import CoreEngine
from .engine_zero import ZeroEngine


class Engine(Protocol):
    """One rank's part. Between `begin_step` and `gradient_norm` megatron-core's schedule runs the microbatches.

    What the schedule needs of an engine (no_sync_func, finalize_model_grads_func, grad_scale_func) stands in the
    model's TransformerConfig from its making on.
    """

    model: nn.Module
    """what the schedule and validation call"""

    def begin_step(self, lr: float) -> None:
        """Set rates for the next update and forget the last gradients."""

    def gradient_norm(self) -> float:
        """The global l2 norm over all model ranks of the summed gradients, divided by the count of tokens.

        A collective call, alike on every rank.
        """

    def update(self, norm: float) -> None:
        """Scale gradients of l2 norm `norm` to at most optimizer.clip (0: as they are) and update the weights."""

    def own_gradients(self) -> Iterator[tuple[Any, Tensor]]:
        """(sharded weight, what this rank adds to its gradient): over data- and context-parallel ranks, each number
        once. Between `gradient_norm` and `update`.
        """

    def updates(self) -> int:
        """Updates that AdamW has made; its bias correction hangs on it."""

    def state(self) -> dict[str, Any]:
        """{"weights": .., "moments": ..}: ShardedTensors by name, as every engine and layout reads and writes them.

        A collective call. Raises ValueError where a trained weight has no name.
        """

    def room_for_state(self) -> dict[str, Any]:
        """The same to be read into, before there was an update too. A collective call."""

    def put_state(self, stored: dict[str, Any], updates: int) -> None:
        """Go on from what was read into `room_for_state`, after so many updates. A collective call."""

    def weights(self) -> dict[str, Any]:
        """The weights alone, to be read into. A collective call."""

    def put_weights(self, weights: dict[str, Tensor]) -> None:
        """Start from these weights, with moments of zero. A collective call."""

    def close(self) -> None:
        """Let go of the model, which isn't trained any more: hooks would keep it, and its groups, in memory."""


ENGINES: dict[str, Callable[[Run, MemoryLanguageModel, ParallelMesh], Engine]] = {
    "megatron": CoreEngine,
    "deepspeed": ZeroEngine,
}
"""optimizer.engine -> what makes it."""


def refuse_missing_engine(run: Run) -> None:
    """Raise ValueError, with the command that installs it, where what optimizer.engine names isn't here."""
    if run.optimizer.engine == "deepspeed":
        refuse_without_deepspeed()


def make_engine(run: Run, model: MemoryLanguageModel, mesh: ParallelMesh) -> Engine:
    """The engine of `run` around this rank's bare model."""
    return ENGINES[run.optimizer.engine](run, model, mesh)
