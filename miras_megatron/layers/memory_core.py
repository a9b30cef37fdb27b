"""What every memory layer owns: the paths into a memory, its gates and its slow parameters (rules 12.1).

    x -> linear -> depthwise causal convolution -> SiLU -> l2 norm on q and k -> memory -> reads

The query path and the write path are separate, since memory as context (MAC) asks with one stream and
writes another. What becomes of the reads is the blocks' business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..memory import MemoryInputs, MemoryState, has_fused, read_memory, replay_scan, scan_memory
from .backends import pick_scan
from .block_spec import BlockSpec
from .carry import ALL_HEADS, LOCAL, StateCarry
from .documents import CuSeqlens, Documents, last_rows
from .gates import MemoryGates
from .head_norm import unit
from .linear import LinearFactory, own_heads
from .short_conv import ShortConv

Tree = dict[str, Any]


class SlowWeights(nn.ParameterDict):
    """W_0 and what goes with it. Read by a call, where libraries that keep weights elsewhere hook in to bring them."""

    __call__ = nn.Module.__call__  # ParameterDict refuses

    def forward(self) -> dict[str, Tensor]:
        return dict(self.items())


class MemoryCore(nn.Module):
    """The memory of N heads of width D on this rank, with the paths that lead into it."""

    def __init__(self, spec: BlockSpec, factory: LinearFactory, generator: torch.Generator):
        super().__init__()
        self.spec = spec
        self.scan_function = pick_scan(spec.rule)
        self.heads, self.width = spec.heads // factory.shards, spec.head_dim
        self.query = factory.make(spec.hidden, spec.hidden, split="column", std=spec.init_std)
        self.key_value = factory.make(spec.hidden, 2 * spec.hidden, split="column", std=spec.init_std)
        self.query_conv = ShortConv(spec.hidden, spec.conv, factory, generator)
        self.key_value_conv = ShortConv(2 * spec.hidden, spec.conv, factory, generator)
        self.gates = MemoryGates(spec, factory)
        full = spec.rule.init_params(spec.heads, spec.head_dim, generator=generator, dtype=torch.float64)
        fixed = spec.rule.fixed_params
        self.weights = SlowWeights({n: own_heads(x.float(), factory) for n, x in full.items() if n not in fixed})
        # plain tensors, not buffers: a module cast to bf16 must not round them
        self.fixed = {name: own_heads(full[name], factory).detach() for name in fixed}

    def params(self) -> dict[str, Tensor]:
        """The slow parameters, as `scan_memory` takes them."""
        weights: dict[str, Tensor] = self.weights()
        device = next(iter(weights.values())).device
        return weights | {name: x.to(device) for name, x in self.fixed.items()}

    def start(self, batch: int) -> MemoryState:
        """The memory before the first token."""
        return self.spec.rule.init_state(self.params(), batch)

    def blank(self, batch: int) -> Tree:
        """The whole state before the first token: empty tails and the start of the memory."""
        paths = {"query": (self.query, self.query_conv), "key_value": (self.key_value, self.key_value_conv)}
        widths = {"query": self.heads * self.width, "key_value": 2 * self.heads * self.width}
        memory = self.start(batch)
        device = memory.weights[0].device  # not the projections': whoever offloads them keeps them elsewhere
        tails = {
            name: cast(Tensor, linear.weight).new_zeros(batch, conv.context, widths[name], device=device)
            for name, (linear, conv) in paths.items()
        }
        return tails | {"memory": memory}

    # -- paths ---------------------------------------------------------------------------------------
    def ask(
        self, x: Tensor, tails: Tree, documents: Documents | None, carry: StateCarry = LOCAL
    ) -> tuple[Tensor, Tensor]:
        """Queries [B, T, N, D] of x [B, T, d], and the convolution's tail; `tails` may have the tail so far."""
        rows, after = self._convolve({"query": self.query(x)}, tails, documents, carry)
        return self._queries(rows["query"]), after["query"]

    def _queries(self, rows: Tensor) -> Tensor:
        return unit(rows.unflatten(-1, (self.heads, self.width)))

    def _keys_values(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        key, value = rows.unflatten(-1, (self.heads, 2, self.width)).unbind(-2)
        return unit(key), value

    def _convolve(
        self, streams: dict[str, Tensor], tails: Tree, documents: Documents | None, carry: StateCarry
    ) -> tuple[dict[str, Tensor], Tree]:
        """Each stream through its convolution, and the tails to go on from."""
        convs = {"query": self.query_conv, "key_value": self.key_value_conv}
        width = self.query_conv.context
        known = {name: tails[name] for name in streams if name in tails}
        contexts = carry.left_contexts(streams, width, known, documents)
        after = {name: last_rows(contexts[name], x, documents) for name, x in streams.items()}
        first = next(iter(streams.values()))
        place = documents.place(first.device) if documents is not None and width else None
        return {name: convs[name](x, contexts[name], place) for name, x in streams.items()}, after

    # -- memory --------------------------------------------------------------------------------------
    def inputs(
        self, x: Tensor, state: Tree, documents: Documents | None, carry: StateCarry = LOCAL
    ) -> tuple[MemoryInputs, Tree]:
        """Everything a scan reads for x [B, T, d], and the tails that go with it."""
        streams = {"query": self.query(x), "key_value": self.key_value(x)}
        rows, tails = self._convolve(streams, state, documents, carry)
        key, value = self._keys_values(rows["key_value"])
        return MemoryInputs(self._queries(rows["query"]), key, value, **self.gates(x)), tails

    def scan(
        self,
        inputs: MemoryInputs,
        state: MemoryState,
        documents: Documents | None = None,
        heads: slice = ALL_HEADS,
    ) -> tuple[Tensor, MemoryState]:
        """Write and read token by token: reads [B, T, N, D] and the state after the last one.

        heads  which of this rank's heads `inputs` and `state` are of
        """
        spec, params = self.spec, self.params()
        if heads != ALL_HEADS:
            params = {name: x[heads] for name, x in params.items()}
        return self.scan_function(
            spec.rule, params, inputs, state, spec.chunk_size, borders(documents), spec.checkpoint_every
        )

    @property
    def replays(self) -> bool:
        """Whether there is a `replay`, and whether what leads into the memory may be computed again without ranks."""
        reference = self.scan_function is scan_memory and has_fused(self.spec.rule) and self.spec.gates == "head"
        return reference and self.heads == self.spec.heads

    def replay(self, inputs: MemoryInputs, state: MemoryState) -> tuple[Tensor, MemoryState]:
        """`scan` when its span is computed again for backward: blank values, nothing is walked (`replay_scan`)."""
        spec = self.spec
        return replay_scan(spec.rule, self.params(), inputs, state, spec.chunk_size, spec.checkpoint_every)

    def read(self, state: MemoryState, query: Tensor) -> Tensor:
        """Reads [B, T, N, D] of the running memory, which stays as it is."""
        return read_memory(self.spec.rule, self.params(), state, query)


@dataclass
class HeadScan:
    """`core.scan` as a carry gets it, which says that heads are independent and whose memory is scanned.

    started  the state that the last scan of all heads started from, wherever it came from; None before it
    """

    core: MemoryCore
    started: MemoryState | None = None

    def __call__(
        self, inputs: MemoryInputs, state: MemoryState, documents: Documents | None, heads: slice
    ) -> tuple[Tensor, MemoryState]:
        self.started = state if heads == ALL_HEADS else None
        return self.core.scan(inputs, state, documents, heads)


def borders(documents: Documents | None) -> CuSeqlens:
    """cu_seqlens of `documents`."""
    return None if documents is None else documents.borders
