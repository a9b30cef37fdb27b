"""What a device could do at most, and the most memory that was held on it: what metrics.jsonl measures a run by."""

from __future__ import annotations

import resource
import sys

import torch

PEAK_TFLOPS: dict[str, dict[str, float]] = {
    "bf16": {"H200": 989, "H100": 989, "H800": 989, "A100": 312, "A800": 312, "L40S": 362, "B200": 2250},
    "tf32": {"H200": 494, "H100": 494, "H800": 494, "A100": 156, "A800": 156, "L40S": 183, "B200": 1125},
    "fp32": {"H200": 67, "H100": 67, "H800": 67, "A100": 19.5, "A800": 19.5, "L40S": 91.6},
}
"""Peak of one device without sparsity, by what its products are computed in and by a part of its name (vendors' data
sheets; SXM where there are several); what a sheet doesn't say is left out."""


def peak_gib() -> float:
    """Most memory held so far, GiB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes / 2**20 if sys.platform != "darwin" else kilobytes / 2**30


def device_peak_tflops(given: float | None, precision: str) -> float | None:
    """The device's matrix-product peak in TFLOP/s for training.precision: `given`, the table's, or None.

    fp32 products run on tensor cores only where torch was told so (tf32).
    """
    if given is not None or not torch.cuda.is_available():
        return given
    name = torch.cuda.get_device_name()
    tf32 = precision == "fp32" and torch.get_float32_matmul_precision() != "highest"
    peaks = PEAK_TFLOPS["tf32" if tf32 else precision]
    return next((peak for part, peak in peaks.items() if part in name), None)
