"""A run as one rank's job: its data, its model, and the engine that trains it."""

from __future__ import annotations

from ..config.schema import Run
from ..model.build import build_model
from ..parallel.layout import decide_layout
from ..parallel.mesh import ParallelMesh
from .engine import make_engine, refuse_missing_engine
from .evaluate import validation_batches
from .feed import make_feed
from .job import Job
from .needles import plant_needles
from .process import settle_process, told_where_memory_is_short
from .run_log import board_class
from .signs import give_signs
from .tokenizer import load_tokenizer


def build_job(run: Run, mesh: ParallelMesh) -> Job:
    """Model, optimizer and data of this rank. Raises ValueError naming field or file."""
    refuse_ordered_where_states_cannot_be_carried(run)
    refuse_missing_engine(run)
    if run.logging.tensorboard:
        board_class()
    refuse_divergence_that_is_not_seen(run)
    tokenizer = load_tokenizer(run.data.tokenizer)
    plant = plant_needles(run.data.needles) if run.data.needles is not None else None
    feed = make_feed(run, tokenizer, rank=mesh.data_rank, ranks=mesh.data, plant=plant)
    validation = validation_batches(run, tokenizer, mesh) if validates(run) else None
    mesh.seed(run.training.seed)
    settle_process(run, mesh)
    with told_where_memory_is_short():
        model = build_model(run, mesh)
        give_signs(model)
        engine = make_engine(run, model, mesh)
    return Job(run, mesh, tokenizer, model, model.config, engine, feed, validation)


def validates(run: Run) -> bool:
    """Whether there is anything to validate on."""
    return run.data.validation is not None or run.data.split_shares[1] > 0


def refuse_ordered_where_states_cannot_be_carried(run: Run) -> None:
    """Packing "ordered" carries states over steps: they must be of constant size and on one stage."""
    if run.data.packing != "ordered":
        return
    if "a" in run.model.letters:
        raise ValueError(
            'data.packing = "ordered": the state of full attention (letter a) grows with the document; '
            "use letter w (sliding window), or data.packing reset"
        )
    if run.parallel.pipeline > 1:
        raise ValueError(
            f'data.packing = "ordered" with parallel.pipeline = {run.parallel.pipeline}: rows that start anew and rows '
            f"that go on are run apart, which needs one stage; set parallel.pipeline to 1, or data.packing to reset"
        )


def refuse_divergence_that_is_not_seen(run: Run) -> None:
    """Where heads are scanned apart nobody looks inside a memory (`layers.probe`)."""
    layout = decide_layout(run)
    if run.training.on_divergence != "ignore" and (layout.carry == "heads" or layout.head_groups > 1):
        raise ValueError(
            f"training.on_divergence = {run.training.on_divergence!r}: with parallel.carry {layout.carry} and "
            f"{layout.head_groups} head groups no memory's norm is recorded; set carry to relay or scan, head_groups "
            "to 1, or on_divergence to ignore"
        )
