"""If these fail, a machine without a GPU can't import us, or a kernel that leaves lanes unwritten passes its tests."""

from __future__ import annotations

import subprocess
import sys

import torch


def test_imports_without_triton_and_without_a_device() -> None:
    """The registry is looked at on every machine, also where Triton isn't installed."""
    script = (
        "import sys; sys.modules['triton'] = None; import miras_kernels; assert isinstance(miras_kernels.KERNELS, dict)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_buffers_start_as_nan_here() -> None:
    """Otherwise a lane that no kernel wrote holds what was there before, which is often right."""
    assert torch.empty(3).isnan().all() and torch.empty_like(torch.zeros(2, 2)).isnan().all()
    assert torch.empty(3, dtype=torch.int64).shape == (3,)
