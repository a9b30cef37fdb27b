"""Everything one rank trains with, in one place: built once by `loop`, read by the step, checkpoints and evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from ..config.schema import Run
from ..model.language_model import MemoryLanguageModel
from ..parallel.exchange import Wait
from ..parallel.layout import ContextLayout, decide_layout
from ..parallel.mesh import ParallelMesh
from .carried import CarriedStates
from .data import Batches
from .feed import Feed
from .tokenizer import Tokenizer
from .trouble import Judge


@dataclass
class Job:
    """One rank's part of a run.

    model      the bare MemoryLanguageModel (this stage's layers); `weights` and checkpoints speak of it
    trained    the same under bf16 conversion and megatron-core's DDP; the schedule calls it. None: only evaluated
    optimizer  None: only evaluated
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
    trained: DistributedDataParallel | None = None
    optimizer: MegatronOptimizer | None = None
    feed: Feed | None = None
    validation: Batches | None = None
    carried: CarriedStates = field(default_factory=CarriedStates)
    waits: list[Wait] = field(default_factory=list)
    judge: Judge = field(init=False)

    def __post_init__(self) -> None:
        self.judge = Judge(self.run.training)

    @property
    def layout(self) -> ContextLayout:
        """How rows are shared."""
        return decide_layout(self.run)
