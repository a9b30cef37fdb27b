"""Buffers that kernels write into start as NaN, so that an output lane nobody wrote is seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def _nan_filled_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, _filled(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", _filled(torch.Tensor.new_empty))


def _filled(make: Any) -> Any:
    def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
        buffer: torch.Tensor = make(*args, **kwargs)
        return buffer.fill_(float("nan")) if buffer.is_floating_point() else buffer

    return filled
