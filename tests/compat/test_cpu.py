"""The CPU adapter."""

import pytest
import torch

from miras_megatron.compat.cpu import FACTORIES, core_without_cuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA the scope is a no-op")


def _names():
    names = [(torch, name) for name in FACTORIES]
    names += [(torch.cuda, name) for name in ("current_device", "synchronize", "empty_cache", "current_stream")]
    return names + [(torch.Tensor, name) for name in ("cuda", "type", "pin_memory")]


def test_torch_is_untouched_outside_the_scope():
    """A patch that leaked would make every later program part believe that a GPU is there."""
    from megatron.core.tensor_parallel import random as core_random

    before = [getattr(owner, name) for owner, name in _names()]
    own = [name in vars(owner) for owner, name in _names()]
    tracker = core_random._CUDA_RNG_STATE_TRACKER
    with pytest.raises(RuntimeError, match="inside"), core_without_cuda(), core_without_cuda():
        assert torch.zeros(1, device="cuda").device.type == "cpu"
        raise RuntimeError("inside")
    assert [getattr(owner, name) for owner, name in _names()] == before
    assert [name in vars(owner) for owner, name in _names()] == own
    assert core_random._CUDA_RNG_STATE_TRACKER is tracker
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")


def test_literals_methods_and_types_answer_for_the_cpu():
    """Each is a way in which core names the device; one forgotten stops training on a machine without GPU."""
    with core_without_cuda():
        assert torch.tensor([1], device=torch.cuda.current_device(), pin_memory=True).device.type == "cpu"
        assert torch.empty(2, device=0).device.type == "cpu"
        x = torch.ones(3, dtype=torch.bfloat16)
        assert x.cuda() is x and x.pin_memory() is x
        assert x.type() == "torch.cuda.BFloat16Tensor" and torch.nn.Parameter(x).type() == "torch.cuda.BFloat16Tensor"
        assert x.type(torch.float32).dtype == torch.float32
        torch.cuda.synchronize()
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
    assert torch.ones(3).type() == "torch.FloatTensor"


def test_named_random_states_are_kept_apart():
    """Under sequence parallelism dropout must differ between ranks without disturbing what they share."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with core_without_cuda():
        tracker = get_cuda_rng_tracker()
        tracker.add("model-parallel-rng", 3)
        torch.manual_seed(1)
        with tracker.fork():
            first = torch.rand(2)
        with tracker.fork():
            second = torch.rand(2)
        outside = torch.rand(2)
    torch.manual_seed(1)
    assert torch.equal(outside, torch.rand(2))
    expected = torch.rand(4, generator=torch.Generator().manual_seed(3))
    assert torch.equal(torch.cat([first, second]), expected)


def test_a_forgotten_seed_is_named():
    """Core's own message would speak of CUDA."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with core_without_cuda(), pytest.raises(ValueError, match=r"ParallelMesh\.seed"), get_cuda_rng_tracker().fork():
        pass
