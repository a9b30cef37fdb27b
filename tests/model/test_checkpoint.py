"""Weights through megatron-core's dist_checkpointing: what one layout writes, another reads."""

import pytest
import torch
import torch.distributed as dist
from helpers.models import random_tokens, small_run
from helpers.worlds import run_world

from miras_megatron.compat.cpu import core_without_cuda
from miras_megatron.model.build import build_model
from miras_megatron.parallel.mesh import ParallelMesh

PATTERN = "mcgwa"


def write_then_read(folder, changes):
    """Two ranks write a model they share; then each reads it whole, alone, into a model of another seed."""
    from megatron.core import dist_checkpointing

    tokens = random_tokens(2, 15)
    shared = small_run(PATTERN, tensor=2, **changes)
    with core_without_cuda(), ParallelMesh(shared.parallel, device="cpu") as mesh:
        model = build_model(shared, mesh).eval()
        sharded = model.sharded_state_dict()
        dist_checkpointing.save(sharded, folder)
        with torch.no_grad():
            expected = model(tokens)
        same = build_model(small_run(PATTERN, tensor=2, seed=9, **changes), mesh).eval()
        same.load_state_dict(dist_checkpointing.load(same.sharded_state_dict(), folder))
        for name, parameter in same.named_parameters():
            assert torch.equal(parameter, model.get_parameter(name)), name
    alone = small_run(PATTERN, seed=8, **changes)
    with core_without_cuda(), ParallelMesh(alone.parallel, device="cpu") as mesh:
        model = build_model(alone, mesh).eval()
        model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), folder))
        with torch.no_grad():
            got = model(tokens)
    dist.barrier()
    return type(sharded).__name__, (got - expected).abs().max().item(), expected.abs().max().item()


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": False, "gates": "channel", "gate_rank": 4}])
def test_two_ranks_write_and_one_reads(tmp_path, changes):
    """Whoever trains on eight GPUs must be able to generate on one. float32: sums over heads in another order."""
    for _, difference, scale in run_world(2, write_then_read, str(tmp_path), changes):
        assert difference < 1e-5 * scale


def test_nothing_in_a_checkpoint_has_to_be_unpickled():
    """Unpickling runs what a stranger wrote: weights are tensors, and every one of the model's is there."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    with ParallelMesh(device="cpu") as mesh:
        model = build_model(small_run(PATTERN, tie_embeddings=False), mesh)
        sharded = model.sharded_state_dict()
    assert all(isinstance(value, ShardedTensor | ShardedTensorFactory) for value in sharded.values())
    assert sharded.keys() == {name for name, _ in model.named_parameters()}
    assert all(name == value.key for name, value in sharded.items())
