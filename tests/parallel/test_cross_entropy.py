"""Cross entropy over a vocabulary that ranks share."""

import pytest
import torch
from helpers.worlds import run_world

from miras_megatron.config.schema import Parallel
from miras_megatron.parallel.cross_entropy import token_losses
from miras_megatron.parallel.mesh import ParallelMesh
from miras_megatron.parallel.tensor import gather_columns


def against_torch(dtype):
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(7, 3, 10, generator=generator, dtype=dtype) * 30).requires_grad_()
    labels = torch.randint(0, 10, (7, 3), generator=generator)
    weights = torch.rand(7, 3, generator=generator, dtype=dtype)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(7, 3)
    (expected * weights).sum().backward()
    with ParallelMesh(Parallel(tensor=2), device="cpu") as mesh:
        mine = slice(5 * mesh.tensor_rank, 5 * mesh.tensor_rank + 5)
        part = logits.detach()[..., mine].clone().requires_grad_()
        losses = token_losses(part * 1.0, labels, mesh.groups.tp)
        (losses * weights).sum().backward()
        gathered = gather_columns(logits.detach()[..., mine].contiguous(), mesh.groups.tp)
    assert torch.equal(gathered, logits)
    return (losses - expected).abs().max().item(), (part.grad - logits.grad[..., mine]).abs().max().item()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 1e-12)])
def test_two_halves_of_a_vocabulary_are_one(dtype, tolerance):
    """float32 is megatron-core's path (logits of +-60, so 1e-5 is rounding), float64 the one that tests rest on."""
    for value, gradient in run_world(2, against_torch, dtype):
        assert value < tolerance and gradient < tolerance
