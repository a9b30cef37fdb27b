"""If these fail, a run takes its GPUs, starts an engine that can't train it, and dies with a library's message, or
worse, learns from wrong gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from miras_megatron.config.check import find_problems
from miras_megatron.config.schema import Data, Model, Optimizer, Parallel, Run, Training, refused_on_resume
from miras_megatron.config.sizes import sizes_of


def run_of(*, parallel: dict[str, Any] | None = None, training: dict[str, Any] | None = None, **optimizer: Any) -> Run:
    """A run that has no problems, with these fields."""
    return Run(
        model=Model(block="lmm"),
        parallel=Parallel(**parallel or {}),
        training=Training(**training or {}),
        optimizer=Optimizer(**{"engine": "deepspeed", **optimizer}),
    )


def problems_of(run: Run) -> list[str]:
    return list(find_problems(run, run.parallel.model_ranks))


@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
def test_every_stage_goes_with_tensor_and_context_parallel_ranks(stage: int | None) -> None:
    """Otherwise a good run is refused."""
    assert problems_of(run_of(zero=stage, parallel={"tensor": 2, "context": 2})) == []
    assert problems_of(run_of(zero=stage, training={"precision": "bf16"})) == []


@pytest.mark.parametrize("stage", [2, 3])
def test_stages_of_a_pipeline_share_gradients_and_weights_where_they_share_no_embedding(stage: int) -> None:
    """Otherwise half of the memory that it would save is refused."""
    run = run_of(zero=stage, parallel={"pipeline": 2}, training={"recompute": True})
    assert problems_of(replace(run, model=Model(block="lmm", tie_embeddings=False))) == []


@pytest.mark.parametrize(
    ("run", "line"),
    [
        (run_of(engine="megatron", zero=1), 'optimizer.zero = 1: only with optimizer.engine "deepspeed"'),
        (run_of(engine="megatron", offload=True), 'optimizer.offload = true: only with optimizer.engine "deepspeed"'),
        (run_of(zero=4), "optimizer.zero = 4: a stage of ZeRO, 0 to 3"),
        (run_of(zero=-1), "optimizer.zero = -1: a stage of ZeRO, 0 to 3"),
        (run_of(distributed=True), "optimizer.distributed = true: is megatron-core's way of sharing"),
        (run_of(zero=0, offload=True), "optimizer.offload = true: ZeRO 0 shares nothing that could be offloaded"),
        (run_of(zero=2, offload=True, training={"precision": "bf16"}), "optimizer.offload = true: with optimizer.zero"),
        (replace(run_of(), data=Data(packing="ordered")), "data.packing = 'ordered': rows of one step are run apart"),
        (run_of(zero=2, parallel={"pipeline": 2}), "optimizer.zero = 2: with parallel.pipeline = 2 two stages"),
        (run_of(zero=3, parallel={"pipeline": 2}), "optimizer.zero = 3: with parallel.pipeline = 2 two stages"),
        (run_of(zero=3, parallel={"pieces": 2}), "optimizer.zero = 3: with parallel.pieces = 2 a piece is computed"),
        (run_of(zero=3, parallel={"forwards_ahead": 1}), "optimizer.zero = 3: with parallel.forwards_ahead = 1 the"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_combine_is_refused_by_name(run: Run, line: str) -> None:
    """A library would say it later, in other words, or not at all."""
    found = [problem for problem in problems_of(run) if problem.startswith(line)]
    assert len(found) == 1, problems_of(run)
    assert "set " in found[0] or "0 to 3" in found[0], "no way out"


def test_a_run_may_change_its_engine_when_it_goes_on() -> None:
    """Checkpoints are the same for all engines; a run that outgrows its GPUs takes a higher stage."""
    before, now = run_of(engine="megatron"), run_of(zero=3, offload=True)
    assert refused_on_resume(before, now) == {}


def test_what_zero_shares_takes_less_of_a_rank() -> None:
    """The dry run says whether a model fits before a node is asked for: with ZeRO each stage shares one thing more."""

    def bytes_of(run: Run) -> float:
        return sizes_of(run, 256, world_size=4).weights_bytes

    whole = bytes_of(run_of(engine="megatron"))
    each = [bytes_of(run_of(zero=stage)) / whole * 16 for stage in range(4)]
    assert each == pytest.approx([16, 8 + 12 / 4, 8 + 16 / 4, 4 + 20 / 4], rel=1e-4)
    assert bytes_of(run_of(zero=3, offload=True)) / whole * 16 == pytest.approx(4 + 8 / 4, rel=1e-4)
