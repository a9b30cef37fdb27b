"""Norms of single gradients: of the whole tensor, under one name in every layout, and together the norm we clip by."""

import math

import pytest
from helpers.tiny_run import records, tiny_config
from helpers.worlds import run_world

from miras_megatron.compat.cpu import core_without_cuda
from miras_megatron.config.load import load_run
from miras_megatron.parallel.mesh import ParallelMesh
from miras_megatron.training.build_job import build_job
from miras_megatron.training.gradients import gradient_norms
from miras_megatron.training.main import main
from miras_megatron.training.step import train_step
from miras_megatron.training.tokenizer import with_vocabulary


def step_of(argv):
    """(global norm, norms by name) of the first step, on this rank."""
    run = with_vocabulary(load_run(argv))
    with core_without_cuda(), ParallelMesh(run.parallel, device="cpu") as mesh:
        report = train_step(build_job(run, mesh), 1, look_at_gradients=True)
    return report.grad_norm, report.gradients


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_parameter_has_its_norm_before_clipping(tmp_path, precision):
    """Together they are the norm that the step reports, whatever it is clipped to."""
    argv = tiny_config(tmp_path, model__block="mac", optimizer__clip=0.01, training__precision=precision)
    run = with_vocabulary(load_run(argv))
    with core_without_cuda(), ParallelMesh(run.parallel) as mesh:
        job = build_job(run, mesh)
        report = train_step(job, 1, look_at_gradients=True)
        assert report.gradients.keys() == {name for name, p in job.model.named_parameters()}
        assert math.hypot(*report.gradients.values()) == pytest.approx(report.grad_norm, rel=1e-5)
        assert report.grad_norm > 0.1
        assert max(gradient_norms(job).values()) < 0.011  # after the step the gradients are the clipped ones
        assert train_step(job, 2).gradients == {}


@pytest.mark.parametrize(
    "layout",
    [{"tensor": 2}, {"tensor": 2, "sequence": "true"}, {"pipeline": 2}, {}],
    ids=["tensor", "sequence", "pipeline", "data"],
)
def test_norms_hang_on_no_layout(tmp_path, layout):
    """A weight counted twice, or half of one, would look like a wrong gradient; so would a stage's own numbers.

    float32: sums over heads, rows and ranks are taken in another order.
    """
    whole, wanted = step_of(tiny_config(tmp_path, "one", model__block="mac"))
    changes = {f"parallel__{name}": value for name, value in layout.items()}
    for norm, found in run_world(2, step_of, tiny_config(tmp_path, "two", model__block="mac", **changes)):
        assert norm == pytest.approx(whole, rel=1e-5)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-7 * whole), name


def test_they_are_recorded_when_due_and_once_a_step(tmp_path):
    """A resumed run has one line a step; a run that doesn't ask for them has no file."""
    steps = {
        "data__split": "100,0,0",
        "optimizer__decay_steps": 6,
        "logging__gradients_every": 2,
        "checkpoint__every": 3,
    }
    assert main(tiny_config(tmp_path, **steps, training__steps=4)) == 0
    (tmp_path / "run/checkpoints/latest").write_text("step_00000003\n")
    first = records(tmp_path / "run", "gradients.jsonl")
    assert main(tiny_config(tmp_path, **steps, training__steps=6)) == 0
    lines = records(tmp_path / "run", "gradients.jsonl")
    assert [line["step"] for line in lines] == [2, 4, 6] and lines[:2] == first
    assert "gradients" not in records(tmp_path / "run")[1]
    assert main(tiny_config(tmp_path, "none", training__steps=1, data__split="100,0,0")) == 0
    assert not (tmp_path / "none" / "gradients.jsonl").exists()
