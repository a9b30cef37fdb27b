"""Memory as gate (MAG): a sliding window and a memory side by side, one gating the other (rules 1.6, 10.6)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .block_spec import BlockSpec
from .carry import LOCAL, StateCarry
from .documents import CuSeqlens, Documents
from .head_norm import HeadNorm
from .linear import LinearFactory, persistent_rows
from .memory_core import MemoryCore
from .memory_mixer import run_memory
from .probe import Probe
from .window_attention import SlidingWindow

Tree = dict[str, Any]


class MemoryAsGate(nn.Module):
    """o = RMSNorm_1(window attention of [P; x]) * sigmoid(RMSNorm_2(memory of x)), then the output projection.

    With `write_persistent` the memory reads [P; x] as well. State: {"attention", "memory"}.
    """

    def __init__(self, spec: BlockSpec, factory: LinearFactory, generator: torch.Generator):
        super().__init__()
        self.core = MemoryCore(spec, factory, generator)
        self.attention = SlidingWindow(spec, factory)
        count = spec.persistent_tokens
        self.persistent = persistent_rows(count, spec.hidden, generator) if count else None
        self.writes_persistent = spec.write_persistent
        self.attention_norm = HeadNorm(spec.heads, spec.head_dim, spec.norm_eps, factory)
        self.read_norm = HeadNorm(spec.heads, spec.head_dim, spec.norm_eps, factory)
        self.out = factory.make(spec.hidden, spec.hidden, split="row", std=spec.out_std)
        self.probe: Probe | None = None
        self.zero_memory_reads = False

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: CuSeqlens = None,
        state: Tree | None = None,
        return_state: bool = False,
        carry: StateCarry = LOCAL,
    ) -> tuple[Tensor, Tree | None]:
        """x [B, T, d] -> y [B, T, d], and the state after the last token where asked for."""
        documents = Documents.of(cu_seqlens, *x.shape[:2])
        before = state or {"attention": None, "memory": None}
        heads, window = self.attention(x, self.persistent, before["attention"], documents, carry)
        written = self.persistent if self.writes_persistent else None
        reads, memory = run_memory(self.core, x, written, before["memory"], documents, self.probe, carry)
        reads = torch.zeros_like(reads) if self.zero_memory_reads else reads
        mixed = self.attention_norm(heads) * self.read_norm(reads).sigmoid()
        return self.out(mixed.flatten(-2)), {"attention": window, "memory": memory} if return_state else None
