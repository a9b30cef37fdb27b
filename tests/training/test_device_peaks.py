"""A run is measured by what its device could do."""

import torch

from miras_megatron.training.device_peaks import device_peak_tflops


def test_mfu_is_a_share_of_the_peak_of_what_is_computed_in(monkeypatch):
    """float32 has a fifteenth of the bf16 peak of an H100: over the wrong one a good run looks idle."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert device_peak_tflops(None, "bf16") == 989
    assert device_peak_tflops(None, "fp32") == 67
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert device_peak_tflops(None, "fp32") == 494
    assert device_peak_tflops(3.0, "fp32") == 3.0
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some Other GPU")
    assert device_peak_tflops(None, "bf16") is None
