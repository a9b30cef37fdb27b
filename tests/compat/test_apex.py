"""NVIDIA apex is optional and another project bears its name."""

import sys
import types

import pytest
import torch

from miras_megatron.compat import apex


def _install(monkeypatch, modules):
    for name, symbols in modules.items():
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(symbols)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def stub(monkeypatch):
    """A stand-in with NVIDIA's symbols; it records its calls."""
    calls = []

    def norm(x, weight, shape, eps):
        calls.append(shape)
        return torch.nn.functional.rms_norm(x.float(), shape, weight, eps)

    _install(
        monkeypatch,
        {
            "apex": {},
            "apex.optimizers": {"FusedAdam": object},
            "apex.normalization": {},
            "apex.normalization.fused_layer_norm": {"mixed_dtype_fused_rms_norm_affine": norm},
            "amp_C": {},
            "fused_layer_norm_cuda": {},
        },
    )
    return calls


def test_torch_is_used_where_apex_is_not():
    """Without apex nothing may fail: it is on no package index."""
    assert apex.pick_rms_norm(torch.device("cuda")) is apex.torch_rms_norm
    assert apex.describe(torch.device("cuda")) == "AdamW of torch, RMSNorm of torch"


def test_the_adam_that_megatron_took_is_named_and_can_run(monkeypatch, stub):
    """core takes apex's Adam when the class imports; without its extension that fails at the first step."""
    from megatron.core import optimizer as core

    class FusedAdam:
        pass

    FusedAdam.__module__ = "apex.optimizers.fused_adam"
    monkeypatch.setattr(core, "Adam", FusedAdam)
    assert apex.describe(torch.device("cuda")) == "AdamW of apex, RMSNorm of apex"
    assert apex.describe(torch.device("cpu")) == "AdamW of apex, RMSNorm of torch"
    monkeypatch.delitem(sys.modules, "amp_C")
    with pytest.raises(ValueError, match="amp_C.*uninstall"):
        apex.describe(torch.device("cuda"))


def test_the_package_of_the_same_name_is_not_taken_for_nvidias(monkeypatch):
    """`pip install apex` fetches another project, and a run on it would fail at its first step."""
    _install(monkeypatch, {"apex": {}, "amp_C": {}, "fused_layer_norm_cuda": {}})
    assert apex.find("fused_adam") is None and apex.find("fused_rms_norm") is None


def test_a_build_without_extensions_is_not_used(monkeypatch, stub):
    """apex built without its CUDA extensions imports well and fails at the first call."""
    monkeypatch.delitem(sys.modules, "amp_C")
    assert apex.find("fused_adam") is None and apex.find("fused_rms_norm") is not None


def test_fused_parts_are_used_on_cuda_only(stub):
    """Fused kernels take CUDA tensors; on a CPU they would crash."""
    x, weight = torch.randn(3, 5, dtype=torch.bfloat16), torch.rand(5)
    fused = apex.pick_rms_norm(torch.device("cuda"))(x, weight, 1e-6)
    assert fused.dtype == torch.bfloat16 and stub[-1] == (5,)
    assert torch.equal(fused, apex.torch_rms_norm(x, weight, 1e-6))
    assert apex.pick_rms_norm(torch.device("cpu")) is apex.torch_rms_norm


def test_norm_computes_in_the_wider_dtype():
    """A norm squared and summed in bf16 loses three digits at the door of every layer."""
    x = torch.randn(4, 7, dtype=torch.float64)
    weight = torch.rand(7, dtype=torch.float64)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    torch.testing.assert_close(apex.torch_rms_norm(x, weight, 1e-6), expected, rtol=1e-12, atol=0)
    low = apex.torch_rms_norm(x.bfloat16(), weight.float(), 1e-6)
    exact = apex.torch_rms_norm(x.bfloat16().double(), weight.float().double(), 1e-6)
    assert torch.equal(low, exact.bfloat16())
