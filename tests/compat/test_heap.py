"""If these fail, memory on a CPU grows with the number of pieces: holes in the heap that nothing fits into."""

import platform
import subprocess
import sys

import pytest

TRY = """
import torch
from miras_megatron.compat.heap import LARGE, give_back_large_blocks

def resident():
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * 4096

assert give_back_large_blocks()
first = torch.ones(32 * LARGE, dtype=torch.uint8)
del first                         # by itself glibc would now keep blocks of up to 32 MiB on the heap
small, before = [], resident()
for _ in range(64):
    large = torch.ones(2 * LARGE, dtype=torch.uint8)
    small.append(torch.ones(4096, dtype=torch.uint8))
    del large
    pinned = torch.ones(2 * LARGE + 4096 * len(small), dtype=torch.uint8)
    del pinned
print((resident() - before) / LARGE)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's heap is told anything")
def test_freed_tensors_go_back_to_the_system():
    """Growing tensors among small ones that stay: with large blocks on the heap, their room would stay taken."""
    done = subprocess.run([sys.executable, "-c", TRY], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 2.0, f"{done.stdout.strip()} MiB are held that nobody uses"
