"""Memory as context (MAC): a segment reads the memory, attends to what it read, and writes what attention made.

    h   = read of the memory as it stood at the segment's start           (rules 1.6)
    y   = Attention of the segment over [persistent rows | h | segment]
    o_t = RMSNorm_1(y_t) * sigmoid(RMSNorm_2(read_t)), read_t by y_t's query after y_t was written

Strictly causal: row j of h is seen by tokens t >= j only, and reads take the running memory (rules 10.5).
Segments follow one another, so the step (read, attend, write) is this block's scan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..memory import MemoryState
from .block_spec import BlockSpec
from .carry import LOCAL, StateCarry
from .documents import CuSeqlens, Documents
from .head_norm import HeadNorm, unit
from .lane_states import LaneStates
from .linear import LinearFactory, own_heads, persistent_rows
from .memory_core import MemoryCore
from .probe import Probe, look_inside
from .segments import Group, Plan, plan_segments
from .window_attention import AttentionHeads, attend

Tree = dict[str, Any]


@dataclass
class SegmentInputs:
    """What is known of all tokens before the first segment is walked: [B T, N, ...] each, and the plan.

    features  attention's query, key, value (turned) and, without memory tokens, the memory's query, beside each other
    """

    features: Tensor
    plan: Plan


class MemoryAsContext(nn.Module):
    """MAC. State, batch in dim 0:

    query           tail of the convolution on the layer input's memory queries
    position        [B] int64 on the CPU, tokens in the open segment, 0 .. segment - 1
    lane            memory: MemoryState now; query, key_value: convolution tails of the written stream
    open            start: MemoryState at the open segment's start; key, value [B, segment, N, D] of its tokens;
                    memory_key, memory_value [B, segment or memory_tokens, N, D] of h
    """

    def __init__(self, spec: BlockSpec, factory: LinearFactory, generator: torch.Generator):
        super().__init__()
        self.spec = spec
        self.gather = factory.gather
        self.core = MemoryCore(spec, factory, generator)
        self.attention = AttentionHeads(spec, factory)
        self.attention.start_at_itself()
        count = spec.persistent_tokens
        self.persistent = persistent_rows(count, spec.hidden, generator) if count else None
        asked = torch.empty(spec.heads, spec.memory_tokens, spec.head_dim).normal_(generator=generator)
        self.memory_queries = own_heads(asked, factory) if spec.memory_tokens else None
        self.context_norm = HeadNorm(spec.heads, spec.head_dim, spec.norm_eps, factory)
        self.attention_norm = HeadNorm(spec.heads, spec.head_dim, spec.norm_eps, factory)
        self.read_norm = HeadNorm(spec.heads, spec.head_dim, spec.norm_eps, factory)
        self.out = factory.make(spec.hidden, spec.hidden, split="row", std=spec.out_std)
        self.growing = ("key", "value") if spec.memory_tokens else ("key", "value", "memory_key", "memory_value")
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
        batch, tokens = x.shape[:2]
        documents = Documents.of(cu_seqlens, batch, tokens)
        places = self._places(state, carry)
        ends = return_state or carry.passes_on
        plan = plan_segments(documents, batch, tokens, self.spec.segment, places, ends)
        features, tail = self._features(x, state, documents, places, carry)
        start = {name: state[name] for name in ("lane", "open", "position")} if state is not None else {}
        if carry.before is not None:
            start = self._blank(batch)
        mixed, after = carry.run(self._walk, SegmentInputs(features.flatten(0, 1), plan), start, documents)
        y = self.out(mixed.index_select(0, plan.back(batch * tokens).to(x.device)).unflatten(0, (batch, tokens)))
        return y, after | {"query": tail} if return_state else None

    def _places(self, state: Tree | None, carry: StateCarry) -> list[int] | None:
        """How far into its segment each row stands at token 0; None: all rows are fresh."""
        if carry.before is not None:
            return [tokens % self.spec.segment for tokens in carry.before]
        return None if state is None else [int(p) for p in state["position"]]

    # -- before the first segment --------------------------------------------------------------------
    def _features(
        self,
        x: Tensor,
        state: Tree | None,
        documents: Documents | None,
        places: list[int] | None,
        carry: StateCarry,
    ) -> tuple[Tensor, Tensor]:
        """[B, T, N, 3 D or 4 D] of all tokens, and the tail of the queries' convolution."""
        positions = self._positions(x, documents, places)
        key, value = self.attention.keys_values(x)
        parts = [self.attention.turn(self.attention.queries(x), positions), self.attention.turn(key, positions), value]
        if self.memory_queries is not None:
            return torch.cat(parts, -1), x.new_zeros(x.shape[0], 0, x.shape[2])
        asked, tail = self.core.ask(x, state or {}, documents, carry)
        return torch.cat([*parts, asked.to(x.dtype)], -1), tail

    def _positions(self, x: Tensor, documents: Documents | None, places: list[int] | None) -> Tensor:
        """[B or 1, T] each token's place in its segment."""
        if documents is None and places is None:
            return torch.arange(x.shape[1], device=x.device)[None] % self.spec.segment
        starts = documents.starts if documents is not None else ((0,),) * x.shape[0]
        rows = []
        for row, begins in enumerate(starts):
            place = torch.arange(x.shape[1]) + (0 if places is None else places[row])
            for start in begins[1:]:
                place[start:] = torch.arange(x.shape[1] - start)
            rows.append(place)
        return (torch.stack(rows) % self.spec.segment).to(x.device)

    # -- segment after segment -----------------------------------------------------------------------
    def _blank(self, batch: int) -> Tree:
        """What is carried, before the first segment."""
        spec, lane = self.spec, self.core.blank(batch)
        heads = (self.core.heads, self.core.width)
        rows = lane["query"].new_zeros(batch, spec.segment, *heads)
        context = lane["query"].new_zeros(batch, spec.memory_tokens or spec.segment, *heads)
        opened = {"start": lane["memory"], "key": rows, "value": rows, "memory_key": context, "memory_value": context}
        return {"lane": lane, "open": opened, "position": torch.zeros(batch, dtype=torch.int64)}

    def _walk(
        self, inputs: SegmentInputs, state: Tree, documents: Documents | None, heads: slice
    ) -> tuple[Tensor, Tree]:
        """Mixed heads [sum of the groups' tokens, N D] in the plan's order, and the state of every row.

        `state` is empty or blank at the start.
        """
        plan = inputs.plan
        order = plan.order.to(inputs.features.device)
        sizes = [len(group.lanes) * group.length for group in plan.groups]
        parts = inputs.features.index_select(0, order).split(sizes)
        held = LaneStates(plan, state or None, self.core.start)
        always = self._persistent_keys_values(inputs.features)
        mixed = []
        for group, part in zip(plan.groups, parts, strict=True):
            lane, opened = held.take(group)
            out, after = self._segment(part.unflatten(0, (-1, group.length)), group, lane, opened, always)
            held.put(group, *after, self.spec.segment)
            mixed.append(out.flatten(0, 1))
        return torch.cat(mixed), held.rows(self.spec.segment, self.growing)

    def _segment(
        self, part: Tensor, group: Group, lane: Tree, opened: Tree, always: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tree, Tree]]:
        """Read, attend, write for the tokens of one group: out [G, L, N D], the lanes' and open segments' states."""
        query, key, value, *asked = part.split(self.spec.head_dim, dim=-1)
        opened = self._open_further(opened, key, value, asked[0] if asked else None, group.first)
        y = self._attend(query, opened, group, always)
        normed = self.attention_norm(y)
        written = self.gather(normed.flatten(-2))
        inputs, tails = self.core.inputs(written, lane, None)
        reads, memory = self.core.scan(inputs, lane["memory"])
        if self.probe is not None:
            whole = torch.tensor([i for i, real in enumerate(group.real) if real == group.length])  # pads are no tokens
            seen = inputs.map(lambda x: x.detach()[whole.to(x.device)])
            look_inside(self.core, self.probe, seen, lane["memory"].rows(whole), memory.rows(whole))
        reads = torch.zeros_like(reads) if self.zero_memory_reads else reads
        mixed = normed * self.read_norm(reads.to(y.dtype)).sigmoid()
        return mixed.flatten(-2), (tails | {"memory": memory}, opened)

    def _open_further(self, opened: Tree, key: Tensor, value: Tensor, asked: Tensor | None, first: int) -> Tree:
        """The open segment with the rows of these tokens: attention's keys and values of tokens and of h."""
        grown = {"start": opened["start"], "key": key, "value": value}
        if self.memory_queries is not None and first > 0:
            grown |= {name: opened[name] for name in ("memory_key", "memory_value")}
        else:
            if self.memory_queries is not None:
                asked = unit(self.memory_queries).transpose(0, 1).expand(key.shape[0], -1, -1, -1)
            assert asked is not None
            grown["memory_key"], grown["memory_value"] = self._context(opened["start"], asked.to(key.dtype))
        if first == 0:
            return grown
        return grown | {n: torch.cat([opened[n][:, :first].to(key.dtype), grown[n]], 1) for n in self.growing}

    def _context(self, start: MemoryState, asked: Tensor) -> tuple[Tensor, Tensor]:
        """Attention's keys and values of h, the reads of `asked` [G, L, N, D] from the segment's start."""
        reads = self.core.read(start, asked)
        reads = torch.zeros_like(reads) if self.zero_memory_reads else reads
        return self.attention.keys_values(self.gather(self.context_norm(reads).flatten(-2)))

    def _attend(self, query: Tensor, opened: Tree, group: Group, always: tuple[Tensor, Tensor] | None) -> Tensor:
        """Attention of the tokens over [persistent | h | segment]; persistent rows and h have no rotary position."""
        keys, values = [opened["memory_key"], opened["key"]], [opened["memory_value"], opened["value"]]
        if always is not None:
            for rows, row in zip((keys, values), always, strict=True):
                rows.insert(0, row.expand(query.shape[0], -1, -1, -1))
        mask = _segment_mask(group, self.spec.persistent_tokens, self.spec.memory_tokens).to(query.device)
        return attend(query, torch.cat(keys, 1), torch.cat(values, 1), mask)

    def _persistent_keys_values(self, like: Tensor) -> tuple[Tensor, Tensor] | None:
        return None if self.persistent is None else self.attention.keys_values(self.persistent.to(like.dtype)[None])


def _segment_mask(group: Group, persistent: int, memory_tokens: int) -> Tensor:
    """[L, K] bool: all persistent rows, all learned h rows or those up to the token's own, tokens up to itself."""
    stop = group.first + group.length
    causal = torch.arange(stop) <= torch.arange(group.first, stop)[:, None]
    always = torch.ones(group.length, persistent + memory_tokens, dtype=torch.bool)
    return torch.cat([always, causal] if memory_tokens else [always, causal, causal], 1)
