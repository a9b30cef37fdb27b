"""The C library's heap on a CPU: told to give large blocks back, so that what pieces leave is not full of holes."""

from __future__ import annotations

import ctypes
import platform

M_MMAP_THRESHOLD = -3
LARGE = 1 << 20
"""Bytes of a block that is taken from the system by itself, and goes back to it when it is freed."""


def give_back_large_blocks() -> bool:
    """Keep glibc's bound for large blocks at LARGE, for the whole process; False where the C library is another.

    By itself glibc raises the bound, to 32 MiB at most, whenever such a block is freed. A piece's tensors then lie on
    the heap among smaller ones that outlive them: of what it held after three pieces of 8,192 tokens nearly half was
    free, in holes, and with every piece there were more. The price is fresh pages for every large tensor: a step took a
    fifth longer with pieces of 8,192 tokens, two fifths with 4,096.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    return bool(ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE))
