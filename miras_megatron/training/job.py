"""Everything one rank trains with, in one place: made by `build_job`, read by step, checkpoints and evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..config.schema import Run
from ..model.language_model import MemoryLanguageModel
from ..parallel.exchange import Wait
from ..parallel.layout import ContextLayout, decide_layout
from ..parallel.mesh import ParallelMesh
from .carried import CarriedStates
from .data import Batches
from .engine import Engine
from .feed import Feed
from .tokenizer import Tokenizer
from .trouble import Judge


@dataclass
class Job:
    """One rank's part of a run.

    model      the bare MemoryLanguageModel (this stage's layers); `weights` and checkpoints speak of it
    engine     what trains it. None: only evaluated
    config     the model's TransformerConfig, in which the schedule finds its hooks
    feed       step -> microbatches of this rank. None: the job has no data
    validation this rank's validation rows. None: there are none
    judge      tells bad steps from good ones
    waits      for a neighbour, in the last step
    """

    run: Run
    mesh: ParallelMesh
    tokenizer: Tokenizer
    model: MemoryLanguageModel
    config: Any
    engine: Engine | None = None
    feed: Feed | None = None
    validation: Batches | None = None
    carried: CarriedStates = field(default_factory=CarriedStates)
    waits: list[Wait] = field(default_factory=list)
    judge: Judge = field(init=False)

    def __post_init__(self) -> None:
        self.judge = Judge(self.run.training)

    @property
    def called(self) -> nn.Module:
        """What microbatches are given to: the model as the engine wraps it."""
        return self.model if self.engine is None else self.engine.model

    def close(self) -> None:
        """Nothing is trained any more."""
        if self.engine is not None:
            self.engine.close()

    @property
    def layout(self) -> ContextLayout:
        """How rows are shared."""
        return decide_layout(self.run)
