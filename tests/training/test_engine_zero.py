"""DeepSpeed's ZeRO trains what megatron-core's optimizer trains: the same losses, norms, checkpoints.

float32 to 1e-6: squares of gradients are added in another order, so norms and clipping differ in the last bit. bf16
without clipping, since after a last bit a weight may be rounded the other way: then only that order is left.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from helpers.tiny_run import learned, records, tiny_config, train_here
from helpers.worlds import run_world
from torch.distributed.checkpoint.metadata import MetadataIndex

from miras_megatron.model import language_model
from miras_megatron.parallel import zero as parallel_zero
from miras_megatron.training.engine_core import CoreEngine
from miras_megatron.training.engine_zero import ZeroEngine
from miras_megatron.training.plain_files import read_index, read_places
from miras_megatron.training.trouble import Judge, Trouble

pytestmark = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed isn't installed: pip install deepspeed==0.19.8"
)

UNTIED = {"parallel__pipeline": 2, "model__tie_embeddings": "false"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "data": (2, {}),
    "data and tensor": (4, {"parallel__tensor": 2, "parallel__sequence": "true"}),
    "context": (2, {"parallel__context": 2}),
    "data and context": (4, {"parallel__context": 2}),
    "pieces": (2, {"parallel__pieces": 3, "parallel__forwards_ahead": 1}),
    "data and pipeline": (4, {"parallel__pipeline": 2}),
    "untied pipeline": (4, UNTIED),
    "untied pipeline, one micro-batch": (4, UNTIED | {"training__global_batch": 2}),
    "untied pipeline and context": (4, UNTIED | {"parallel__context": 2, "training__global_batch": 1}),
    "recomputed": (2, {"training__recompute": "true"}),
}
STAGES = {
    "pieces": (0, 1, 2),
    "data and pipeline": (0, 1),
    "untied pipeline": (2, 3),
    "untied pipeline, one micro-batch": (2, 3),
    "untied pipeline and context": (3,),
    "recomputed": (3,),
}
"""Of the layouts that aren't for all: refused (config.engines), or nothing new."""

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"training__precision": "bf16", "optimizer__clip": 0.0},
}
STEPS = {"training__steps": 3, "training__micro_batch": 1, "logging__gradients_every": 3}
DEFAULT = {
    ("data", 1, "bf16"),
    ("data", 2, "fp32"),
    ("data", 3, "fp32"),
    ("context", 2, "fp32"),
    ("data and tensor", 1, "fp32"),
    ("data and pipeline", 1, "fp32"),
    ("untied pipeline", 3, "fp32"),
}
GIVEN = [
    pytest.param(layout, stage, precision, marks=[pytest.mark.full] * ((layout, stage, precision) not in DEFAULT))
    for layout in LAYOUTS
    for stage in STAGES.get(layout, range(4))
    for precision in PRECISIONS
    if (layout, precision) != ("untied pipeline", "bf16")  # stages 2 and 3 add up ranks first, core micro-batches: a
]  # weight rounded the other way makes norms differ by 1e-4 two steps later. One micro-batch is compared in bf16 too
CORE: dict[tuple[str, str], Path] = {}
"""(layout, precision) -> the run of megatron-core's engine, which many stages are compared with."""


def zero(stage: int, **more: Any) -> dict[str, Any]:
    """The fields of ZeRO of `stage`."""
    return {"optimizer__engine": "deepspeed", "optimizer__zero": stage} | more


def train(ranks: int, folder: Path, name: str, **changes: Any) -> Path:
    """Train on so many ranks; the run's folder."""
    assert run_world(ranks, train_here, tiny_config(folder, name, **changes)) == [0] * ranks
    return folder / name


def core_run(layout: str, precision: str, factory: pytest.TempPathFactory) -> Path:
    """The same run by megatron-core's engine."""
    if (layout, precision) not in CORE:
        ranks, changes = LAYOUTS[layout]
        CORE[layout, precision] = train(
            ranks, factory.mktemp("core"), "run", **STEPS, **changes, **PRECISIONS[precision]
        )
    return CORE[layout, precision]


def check_alike(run: Path, other: Path, rel: float) -> None:
    """Losses and gradient norms, step by step."""
    here, there = learned(run), learned(other)
    assert len(here) == len(there) > 0
    for one, two in zip(here, there, strict=True):
        assert one == pytest.approx(two, rel=rel)


@pytest.mark.parametrize(("layout", "stage", "precision"), GIVEN)
def test_zero_learns_what_megatron_core_does(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, layout: str, stage: int, precision: str
) -> None:
    """Losses, global norms, each parameter's, and the tensors on the disk; over accumulated microbatches."""
    core = core_run(layout, precision, tmp_path_factory)
    ranks, changes = LAYOUTS[layout]
    run = train(ranks, tmp_path, "zero", **STEPS, **changes, **PRECISIONS[precision], **zero(stage))
    check_alike(run, core, rel=1e-6)
    norms = [records(folder, "gradients.jsonl")[0]["gradients"] for folder in (run, core)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5, abs=1e-7 * learned(core)[-1][2])  # as between layouts
    stored = [read_index(folder / "checkpoints" / "step_00000003") for folder in (run, core)]
    one, other = ({key: (tuple(x.size), x.properties.dtype) for key, x in index.items()} for index in stored)
    assert one == other


def train_in_blocks(argv: list[str]) -> int:
    """A run whose loss takes 8 tokens at a time and makes their logits again in backward, as long rows do."""
    with mock.patch.object(language_model, "LOGITS_AT_ONCE", 8 * 320):
        return train_here(argv)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.full), 3])
def test_logits_that_are_made_again_find_their_weights(tmp_path: Path, stage: int) -> None:
    """In stage 3 the embedding's weight was given away when backward asks for it again, outside its own module."""
    changes = CUT | {"training__steps": 2}
    runs = {"core": {}, "zero": zero(stage)}
    for name, more in runs.items():
        assert run_world(2, train_in_blocks, tiny_config(tmp_path, name, **changes, **more)) == [0, 0]
    check_alike(tmp_path / "zero", tmp_path / "core", rel=1e-6)


def count_whole_layers(argv: list[str]) -> tuple[int, set[int]]:
    """A run, and how many layers' weights were whole whenever a layer began to work, forward or backward."""
    plain, settings, counts = ZeroEngine.__init__, parallel_zero._settings, set[int]()

    def fetch_when_called(*args: Any) -> dict[str, Any]:
        found = settings(*args)
        found["zero_optimization"]["stage3_prefetch_bucket_size"] = 0  # else all of a model so small comes at once
        return found

    def watch(self: Any, run: Any, model: Any, mesh: Any) -> None:
        plain(self, run, model, mesh)
        layers = model.decoder.layers

        def count(*unused: Any) -> None:
            counts.add(sum(any(weight.numel() for weight in layer.parameters()) for layer in layers))

        for layer in layers:
            layer.register_forward_pre_hook(count)  # DeepSpeed's own, that fetches, came before
            layer.mlp.register_full_backward_pre_hook(count)

    with (
        mock.patch.object(ZeroEngine, "__init__", watch),
        mock.patch.object(parallel_zero, "_settings", fetch_when_called),
    ):
        return train_here(argv), counts


@pytest.mark.parametrize("layout", [pytest.param("recomputed", marks=pytest.mark.full), "data", "pipeline"])
def test_weights_are_whole_while_their_layer_works(tmp_path: Path, layout: str) -> None:
    """What stage 3 is for: with all layers whole at the end of a pass the model doesn't fit after all.

    In a pipeline several forwards wait for their backward.
    """
    _, more = (2, UNTIED) if layout == "pipeline" else LAYOUTS[layout]
    changes = {"training__steps": 2, "model__layers": 4, **more}
    found = run_world(2, count_whole_layers, tiny_config(tmp_path, **CUT | changes, **zero(3)))
    assert found == [(0, {1})] * 2


CUT = {"training__micro_batch": 1, "optimizer__decay_steps": 4, "checkpoint__every": 0}


@pytest.mark.parametrize(
    ("layout", "stage", "precision"),
    [
        pytest.param("data", stage, precision, marks=[pytest.mark.full] * ((stage, precision) not in {(3, "bf16")}))
        for stage in range(4)
        for precision in PRECISIONS
    ]
    + [pytest.param("untied pipeline", stage, "bf16", marks=pytest.mark.full) for stage in (2, 3)],
)
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, layout: str, stage: int, precision: str) -> None:
    """A job that was requeued is the job that wasn't: moments, masters and rates are all there."""
    ranks, more = LAYOUTS[layout]
    changes = CUT | PRECISIONS[precision] | zero(stage) | more
    uncut = train(ranks, tmp_path, "uncut", **changes, training__steps=4)
    for steps in (2, 4):
        cut = train(ranks, tmp_path, "cut", **changes, training__steps=steps)
    assert learned(cut) == learned(uncut)


def check_shared_out(checkpoint: Path) -> None:
    """In stage 3 no rank writes, so none has brought together, much more than its share."""
    index, places = read_places(checkpoint)
    numbers: Counter[str] = Counter()
    for name, entry in index.items():
        for chunk in entry.chunks:
            numbers[places[MetadataIndex(name, chunk.offsets)].relative_path] += chunk.sizes.numel()
    assert len(numbers) == 2 and max(numbers.values()) < 0.55 * numbers.total(), numbers


def test_a_run_moves_between_engines_stages_and_layouts(tmp_path: Path) -> None:
    """One checkpoint for all: a run outgrows its engine, its stage and its ranks, and learns what it would have.

    float32: other layouts add in another order.
    """
    uncut = train(2, tmp_path, "uncut", **CUT, training__steps=4)
    moved = tmp_path / "moved"
    for steps, changes in enumerate(({}, zero(3), zero(1, parallel__tensor=2), zero(2, parallel__context=2)), start=1):
        train(2, tmp_path, "moved", **CUT, training__steps=steps, **changes)
        if steps == 2:
            check_shared_out(moved / "checkpoints" / "step_00000002")
    check_alike(moved, uncut, rel=1e-6)
    train(2, tmp_path, "moved", **CUT, training__steps=5)


def roll_back_once(argv: list[str]) -> int:
    """A run that finds its fourth step bad and goes back to the checkpoint after the second."""
    judge, calls = Judge.judge, []

    def judged(self: Judge, loss: float, norm: float, memory: Any) -> Trouble | None:
        calls.append(loss)
        return Trouble("spike", "made up", "roll_back") if len(calls) == 4 else judge(self, loss, norm, memory)

    with mock.patch.object(Judge, "judge", judged):
        return train_here(argv)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full), 3])
def test_a_run_rolls_back_as_with_megatron_core(tmp_path: Path, stage: int) -> None:
    """After a step without an update weights of stage 3 are still whole: the checkpoint's must take their place."""
    changes = CUT | {
        "training__steps": 5,
        "checkpoint__every": 2,
        "evaluate__every": 1,
        "checkpoint__background": "true",
    }
    for name, more in {"core": {}, "zero": zero(stage)}.items():
        argv = tiny_config(tmp_path, name, **(changes | more))
        assert run_world(2, roll_back_once, argv) == [0, 0]
    check_alike(tmp_path / "zero", tmp_path / "core", rel=1e-6)
    losses = [[record["loss"] for record in records(tmp_path / name, "validation.jsonl")] for name in ("zero", "core")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and len(losses[0]) == 5


def test_weights_of_another_run_are_a_start(tmp_path: Path) -> None:
    """training.init_from takes weights only: stage 3 must deal them out, and masters must not be the drawn ones."""
    first = train(2, tmp_path, "first", **CUT, training__steps=1, training__precision="bf16")
    later = {"training__init_from": first, "training__precision": "bf16", "training__steps": 2}
    core, sharded = (
        train(2, tmp_path, name, **CUT, **later, **changes) for name, changes in (("core", {}), ("sharded", zero(3)))
    )
    assert learned(sharded)[0] == pytest.approx(learned(core)[0], rel=1e-6)


def skip_second(argv: list[str]) -> int:
    """A run whose second gradient is no number."""

    def second_is_none(engine: Any) -> Any:
        norms, plain = [], engine.gradient_norm

        def norm(self: Any) -> float:
            norms.append(plain(self))
            return math.nan if len(norms) == 2 else norms[-1]

        return mock.patch.object(engine, "gradient_norm", norm)

    with second_is_none(ZeroEngine), second_is_none(CoreEngine):
        return train_here(argv)


@pytest.mark.parametrize("stage", [pytest.param(stage, marks=[pytest.mark.full] * (stage != 2)) for stage in range(4)])
def test_a_skipped_step_leaves_nothing_behind(tmp_path: Path, stage: int) -> None:
    """Its gradients must not be added to the next step's."""
    changes = CUT | {"training__steps": 3, "training__on_nan": "skip"}
    for name, more in {"core": {}, "zero": zero(stage)}.items():
        assert run_world(2, skip_second, tiny_config(tmp_path, name, **changes, **more)) == [0, 0]
    here, there = learned(tmp_path / "zero"), learned(tmp_path / "core")
    assert here[1][2] == there[1][2] == "nan"
    assert here[2] == pytest.approx(there[2], rel=1e-6)


def spoil(argv: list[str]) -> tuple[int, str]:
    """A run in which one rank's sum of one gradient is no number: its exit code, and what it says."""
    plain, said = ZeroEngine._finish, io.StringIO()

    def finish(self: Any, *args: Any, **options: Any) -> None:
        plain(self, *args, **options)
        for part, gradient in self.zero.own(self.zero.gradients):
            if part.weight is self._bare.decoder.final_layernorm.weight:
                gradient[0] = math.nan

    with mock.patch.object(ZeroEngine, "_finish", finish), contextlib.redirect_stderr(said):
        return train_here(argv), said.getvalue()


def test_a_gradient_that_is_no_number_is_named(tmp_path: Path) -> None:
    """Gradients lie in DeepSpeed's buffers, where the guard alone would find none."""
    for code, said in run_world(2, spoil, tiny_config(tmp_path, **CUT, **zero(2))):
        assert code == 3 and "the gradient of parameter weight of decoder.final_layernorm" in said, said


@pytest.mark.full
@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (1, "bf16"), (2, "fp32"), (3, "fp32"), (3, "bf16")])
def test_offloaded_moments_learn_the_same(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, stage: int, precision: str
) -> None:
    """DeepSpeed's CPU AdamW, with our weight decay and not its own 0, in float32 like torch's.

    1e-5: it takes the root of the second moment before it divides by the bias correction.
    """
    core = core_run("data", precision, tmp_path_factory)
    argv = tiny_config(tmp_path, "zero", **STEPS, **PRECISIONS[precision], **zero(stage, optimizer__offload="true"))
    assert run_world(2, train_here, argv, deadline=900) == [0, 0]  # the first time it is compiled
    check_alike(tmp_path / "zero", core, rel=1e-5)
