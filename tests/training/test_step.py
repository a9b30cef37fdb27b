"""One optimizer step: the same whatever it is cut into, and pulling only at what may be pulled at."""

from contextlib import contextmanager

import pytest
import torch
from helpers.tiny_run import tiny_config
from helpers.worlds import run_world

from miras_megatron.compat.cpu import core_without_cuda
from miras_megatron.config.load import load_run
from miras_megatron.parallel.mesh import ParallelMesh
from miras_megatron.training.build_job import build_job
from miras_megatron.training.optimizer import optimizer_parameters, set_rates
from miras_megatron.training.step import train_step
from miras_megatron.training.tokenizer import with_vocabulary


@contextmanager
def job_of(folder, **changes):
    run = with_vocabulary(load_run(tiny_config(folder, **changes)))
    with core_without_cuda(), ParallelMesh(run.parallel) as mesh:
        yield build_job(run, mesh)


def weights_after(folder, steps, **changes):
    with job_of(folder, **changes) as job:
        reports = [train_step(job, step) for step in range(1, steps + 1)]
        return reports, {name: p.detach().clone() for name, p in job.model.named_parameters()}


def test_gradient_accumulation_is_one_large_batch(tmp_path):
    """A token weighs the same in whichever microbatch it was read: rows have different numbers of counted tokens."""
    reports, weights = weights_after(tmp_path / "a", 3, training__micro_batch=4)
    small, accumulated = weights_after(tmp_path / "b", 3, training__micro_batch=1)
    for one, other in zip(reports, small, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-6)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(accumulated[name], weight, rtol=1e-3, atol=1e-5, msg=name)


def test_gradients_are_clipped_to_the_global_norm(tmp_path):
    """The reported norm is that before clipping; with Adam alone one would not notice a missing clip."""
    with job_of(tmp_path, optimizer__clip=0.01) as job:
        report = train_step(job, 1)
        squares = sum(float(p.grad.double().square().sum()) for p in optimizer_parameters(job.engine.optimizer))
        assert report.grad_norm > 0.1
        assert squares**0.5 == pytest.approx(0.01, rel=1e-3)


def test_only_projections_decay(tmp_path):
    """Decay would make a memory's learned start, its gates and norms forget; embeddings are spared too."""
    with job_of(tmp_path, model__block="mac", optimizer__weight_decay=0.5) as job:
        set_rates(job.engine.optimizer, 0.25, job.run.optimizer)
        decays = {id(p): g["weight_decay"] for g in job.engine.optimizer.param_groups for p in g["params"]}
        assert {g["lr"] for g in job.engine.optimizer.param_groups} == {0.25}
        pulled = {name for name, p in job.model.named_parameters() if decays[id(p)] > 0}
        spared = {name for name, p in job.model.named_parameters() if decays[id(p)] == 0}
    assert len(pulled) >= 10
    assert all(name.endswith(".weight") and ("linear_fc" in name or "mixer" in name) for name in pulled)
    for sign in ("embedding", "layernorm", "core.weights", "persistent", "gates"):
        assert any(sign in name for name in spared), sign
        assert not any(sign in name for name in pulled), sign


def test_bf16_keeps_memory_gates_and_norms_in_float32_and_masters_of_the_rest(tmp_path):
    """A state or a gate in bf16 drifts within a row; a weight without a master stops learning at small rates."""
    with job_of(tmp_path, training__precision="bf16") as job:
        kinds = {name: p.dtype for name, p in job.model.named_parameters()}
        train_step(job, 1)
        assert {p.dtype for p in optimizer_parameters(job.engine.optimizer)} == {torch.float32}
        for name, p in job.model.named_parameters():
            if p.dtype == torch.bfloat16:
                assert torch.equal(p, p.main_param.bfloat16()), name
    assert kinds["decoder.layers.0.mlp.linear_fc1.weight"] == torch.bfloat16
    assert {x for name, x in kinds.items() if "core.weights" in name or "norm" in name} == {torch.float32}


def test_a_step_counts_what_it_read(tmp_path):
    """Throughput and progress are computed from it: masked tokens were read too."""
    with job_of(tmp_path) as job:
        report = train_step(job, 1, look_inside=True)
        assert (report.tokens, report.step, report.lr) == (96, 1, 0.005)
        assert report.tokens_per_s == pytest.approx(96 / report.seconds)
        assert set(report.memory) == {"layer_1", "layer_2"}
        assert job.engine.updates() == 1


def test_looking_inside_changes_nothing(tmp_path):
    """Records must not steer the run they record."""
    with job_of(tmp_path / "a") as job:
        seen = [train_step(job, step, look_inside=True).loss for step in (1, 2)]
    with job_of(tmp_path / "b") as job:
        unseen = [train_step(job, step).loss for step in (1, 2)]
    assert seen == unseen


def embedding_after(folder, steps):
    """This stage's copy of the tied embedding."""
    changes = {"parallel__pipeline": 2, "optimizer__weight_decay": 0.5}
    _, weights = weights_after(folder, steps, **changes)
    (copy,) = [weight for name, weight in weights.items() if "embedding" in name or "output_layer" in name]
    return copy


def test_two_stages_keep_one_tied_embedding(tmp_path):
    """First and last stage hold a copy each; a decay, or a gradient, that only one sees makes them two weights."""
    tiny_config(tmp_path)
    first, last = run_world(2, embedding_after, tmp_path, 3)
    assert torch.equal(first, last)
