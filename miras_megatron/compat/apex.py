"""NVIDIA apex: its fused Adam and fused RMSNorm where they are installed, torch's otherwise. The only mention of apex.

apex is built from source and never required; the name on the package index belongs to another project, so
what counts is not the package but the very symbols that are called, and the compiled extension they need.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
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


def adamw(
    groups: Iterable[dict[str, Any]],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    device: torch.device,
) -> torch.optim.Optimizer:
    """AdamW with decoupled weight decay over parameter groups: apex's fused one on CUDA if installed, else torch's."""
    fused = find("fused_adam") if device.type == "cuda" else None
    if fused is not None:
        optimizer = fused(list(groups), lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, adam_w_mode=True)
        assert isinstance(optimizer, torch.optim.Optimizer)
        return optimizer
    return torch.optim.AdamW(list(groups), lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


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
