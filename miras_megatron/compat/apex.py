"""NVIDIA apex: its fused RMSNorm and Adam where they are installed, torch's otherwise. The only mention of apex.

apex is built from source and never required; the name on the package index belongs to another project, so
what counts is not the package but the very symbols that are called, and the compiled extension they need.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SYMBOLS = {
    "fused_adam": ("apex.optimizers", "FusedAdam", "amp_C"),
    "fused_rms_norm": (
        "apex.normalization.fused_layer_norm",
        "mixed_dtype_fused_rms_norm_affine",
        "fused_layer_norm_cuda",
    ),
}
"""What we call -> (module, symbol, compiled extension it needs)."""


def find(name: str) -> Callable[..., Any] | None:
    """The symbol `name` of SYMBOLS, or None where module, symbol or extension is missing."""
    module, symbol, extension = SYMBOLS[name]
    try:
        importlib.import_module(extension)
        return getattr(importlib.import_module(module), symbol, None)
    except ImportError:
        return None


def describe(device: torch.device) -> str:
    """One line for a run's log: which AdamW and which RMSNorm work on `device`.

    megatron-core chooses its AdamW itself, at import: TransformerEngine's, else apex's, else torch's. Raises
    ValueError where it took one from an apex that can't run.
    """
    from megatron.core import optimizer as core

    adam = str(core.Adam.__module__).split(".")[0]
    if adam == "apex" and find("fused_adam") is None:
        raise ValueError(
            "NVIDIA apex is installed without its extension amp_C, so megatron-core's optimizer can't start: "
            "build apex with its CUDA extensions, or uninstall it"
        )
    norm = "apex" if device.type == "cuda" and find("fused_rms_norm") is not None else "torch"
    return f"AdamW of {adam}, RMSNorm of {norm}"


def pick_rms_norm(device: torch.device) -> Callable[[Tensor, Tensor, float], Tensor]:
    """The function (x [..., d], weight [d], eps) -> x / rms(x) * weight to use on `device`, chosen once.

    It computes in the wider dtype of x and weight (float32 for bf16 activations and float32 weights)
    and returns x's dtype.
    """
    fused = find("fused_rms_norm") if device.type == "cuda" else None
    if fused is None:
        return torch_rms_norm

    def apex_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out: Tensor = fused(x, weight, weight.shape, eps)
        return out.to(x.dtype)

    return apex_rms_norm


def torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, in the wider dtype of the two; returns x's dtype."""
    wide = torch.promote_types(x.dtype, weight.dtype)
    return F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps).to(x.dtype)
