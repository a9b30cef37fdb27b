"""Two tensor-parallel ranks against one: the same model, the same gradients, the same checkpoint."""

import pytest
import torch
import torch.distributed as dist
from helpers.models import random_tokens, small_run
from helpers.numerics import assert_close
from helpers.worlds import run_world

from miras_megatron.compat.cpu import core_without_cuda
from miras_megatron.model.build import build_model
from miras_megatron.parallel.mesh import ParallelMesh
from miras_megatron.parallel.tensor import own_slice
from miras_megatron.training.loss import summed_loss

TOKENS = 22


def step(run, mesh):
    """One forward and backward in float64: the loss and every gradient by name."""
    model = build_model(run, mesh).double()
    tokens = random_tokens(2, TOKENS + 1)
    borders = [torch.tensor([0, 7, TOKENS]), torch.tensor([0, TOKENS])]
    mask = (torch.arange(TOKENS) % 5 > 0).expand(2, -1)
    total, count = summed_loss(model(tokens[:, :-1], tokens[:, 1:], mask, borders), mask)
    (total / count).backward()
    return model, (total / count).item()


def compare(pattern, changes):
    """On each of two ranks: the whole model alone, then half of it; the largest difference found."""
    with core_without_cuda(), ParallelMesh(device="cpu") as mesh:
        mesh.seed(5)
        whole, expected = step(small_run(pattern, **changes), mesh)
        weights = {name: p.detach() for name, p in whole.named_parameters()}
        gradients = {name: p.grad for name, p in whole.named_parameters()}
    run = small_run(pattern, tensor=2, **changes)
    with core_without_cuda(), ParallelMesh(run.parallel, device="cpu") as mesh:
        mesh.seed(5)
        part, loss = step(run, mesh)
        if run.parallel.sequence:
            for parameter in part.parameters():
                if getattr(parameter, "sequence_parallel", False):
                    dist.all_reduce(parameter.grad, group=mesh.groups.tp)
        differences = {"loss": abs(loss - expected)}
        for name, parameter in part.named_parameters():
            mine = _slicer(parameter, mesh)
            assert torch.equal(parameter, mine(weights[name])), f"{name} starts differently"
            scale = gradients[name].abs().max().clamp(min=1e-6)
            differences[name] = ((parameter.grad - mine(gradients[name])).abs().max() / scale).item()
        assert differences.keys() - {"loss"} == weights.keys()
        halves = sum(p.tensor_model_parallel for _, p in part.named_parameters() if hasattr(p, "tensor_model_parallel"))
        differences["stream"] = stream(part)
    return differences, halves


@torch.no_grad()
def stream(model):
    """How far logits in three cuts are from those in one pass, on ranks that hold a part of every state."""
    tokens, states, parts = random_tokens(2, TOKENS), None, []
    for cut in tokens.split([8, 2, 12], dim=1):
        logits, states = model(cut, states=states, return_states=True)
        parts.append(logits)
    return (torch.cat(parts, 1) - model(tokens)).abs().max().item()


def _slicer(parameter, mesh):
    dim = getattr(parameter, "partition_dim", -1)
    stride = getattr(parameter, "partition_stride", 1)
    return lambda full: own_slice(full, dim if dim >= 0 else None, mesh.tensor, mesh.tensor_rank, stride)


@pytest.mark.parametrize(
    ("pattern", "changes"),
    [
        ("mcgwa", {}),
        ("mcg", {"gates": "channel", "gate_rank": 4, "memory_tokens": 3, "write_persistent": True}),
        ("mcw", {"sequence": True, "tie_embeddings": False}),
        ("m", {"rule": "retnet"}),
        ("m", {"rule": "yaad", "delta": "constant", "horizon_spread": 4.0, "recompute": True}),
    ],
)
def test_two_ranks_are_one_model(pattern, changes):
    """A weight cut through a head, or a gradient summed twice or never, trains another model without a word.

    float64; the sums over heads are taken in another order.
    """
    for differences, halves in run_world(2, compare, pattern, changes):
        worst = max(differences, key=differences.get)
        assert differences[worst] < 1e-9, f"{worst}: {differences[worst]:.1e}"
        assert halves > 4 * len(pattern)


def three_steps(changes):
    """Loss and gradient norm of three steps of core's schedule, DDP and AdamW on a model of every block."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    run, seen = small_run("mcgwa", **changes), []

    def forward(batches, model):
        tokens = next(batches)
        return model(tokens[:, :-1], labels=tokens[:, 1:]), report

    def report(losses):
        total, count = summed_loss(losses)
        seen.append((total / count).item())
        return total, count, {}

    with core_without_cuda(), ParallelMesh(run.parallel, device="cpu") as mesh:
        mesh.seed(5)
        model = build_model(run, mesh)
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        trained = DistributedDataParallel(model.config, ddp_config, model)
        model.config.finalize_model_grads_func = finalize_model_grads
        optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=1.0), [trained], use_gloo_process_groups=False
        )
        norms = []
        for _ in range(3):
            trained.zero_grad_buffer()
            optimizer.zero_grad()
            get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(random_tokens(4, 21).split(2)),
                model=[trained],
                num_microbatches=2,
                seq_length=20,
                micro_batch_size=2,
                forward_only=False,
            )
            norms.append(optimizer.step()[1])
    return torch.tensor(seen), torch.tensor(norms)


def test_megatrons_optimizer_sees_one_model():
    """core counts a weight in its gradient norm once or once a rank by our marks; wrong marks clip another model.

    float32, three AdamW steps, with sequence parallelism and without it.
    """
    (losses, norms), _ = run_world(2, three_steps, {})
    for sequence in (False, True):
        for other_losses, other_norms in run_world(2, three_steps, {"tensor": 2, "sequence": sequence}):
            assert_close("losses", other_losses, losses, rtol=1e-5)
            assert_close("gradient norms", other_norms, norms, rtol=1e-5)
