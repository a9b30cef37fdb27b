"""MemoryMixer (LMM): a memory as the only token mixer (rules 12.1)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from .block_spec import BlockSpec
from .carry import LOCAL, StateCarry
from .documents import CuSeqlens, Documents
from .head_norm import HeadNorm
from .linear import LinearFactory, persistent_rows
from .memory_core import MemoryCore
from .probe import Probe, look_at_last_chunk
from .stream import scan_after_persistent, scan_by_spans, scan_stream, takes_spans

Tree = dict[str, Any]


class MemoryMixer(nn.Module):
    """x -> memory -> RMSNorm per head -> times SiLU(x W_g) -> output projection.

    State: {"query", "key_value": convolution tails, "memory": MemoryState}, batch in dim 0.
    """

    def __init__(self, spec: BlockSpec, factory: LinearFactory, generator: torch.Generator):
        super().__init__()
        self.core = MemoryCore(spec, factory, generator)
        self.norm = HeadNorm(spec.heads, spec.head_dim, spec.norm_eps, factory)
        self.gate = factory.make(spec.hidden, spec.hidden, split="column", std=spec.init_std)
        self.out = factory.make(spec.hidden, spec.hidden, split="row", std=spec.out_std)
        writes = spec.write_persistent and spec.persistent_tokens > 0
        self.persistent = persistent_rows(spec.persistent_tokens, spec.hidden, generator) if writes else None
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
        reads, after = run_memory(self.core, x, self.persistent, state, documents, self.probe, carry)
        reads = torch.zeros_like(reads) if self.zero_memory_reads else reads
        mixed = self.norm(reads).flatten(-2) * silu(self.gate(x))
        return self.out(mixed), after if return_state else None


def run_memory(
    core: MemoryCore,
    x: Tensor,
    persistent: Tensor | None,
    state: Tree | None,
    documents: Documents | None,
    probe: Probe | None,
    carry: StateCarry = LOCAL,
) -> tuple[Tensor, Tree]:
    """Reads [B, T, N, D] of a stream and its state; `persistent` rows are written at document starts where given."""
    if persistent is not None:
        reads, after, scanned = scan_after_persistent(core, x, persistent, state, documents, carry)
    elif probe is None and takes_spans(core, x, state, documents, carry):
        return scan_by_spans(core, x, state)
    else:
        reads, after, scanned = scan_stream(core, x, state, documents, carry)
    if probe is not None and scanned.start is not None:
        look_at_last_chunk(core, probe, scanned.inputs, scanned.start, scanned.first)
    return reads, after
