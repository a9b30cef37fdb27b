"""Attention of the layers: a sliding window with persistent rows (Titans' short-term memory), and full attention.

The softmax is torch's scaled_dot_product_attention. A window of w tokens counts the token itself; it is
walked in blocks of w queries against 2 w keys, so cost and masks are linear in T. Keys are kept unrotated
and turned by their place in this call: only differences of places matter, so a stream may go on for ever.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from .block_spec import BlockSpec
from .carry import LOCAL, StateCarry
from .documents import CuSeqlens, Documents, last_rows
from .linear import LinearFactory, persistent_rows
from .rotary import rotary_table, rotate

Tree = dict[str, Any]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention, [B, T, N, D] each; mask bool [B, 1, T, K], True where a query sees a key."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale).transpose(1, 2)


class AttentionHeads(nn.Module):
    """Projections of N heads on this rank: queries, and keys with values (packed per head)."""

    def __init__(self, spec: BlockSpec, factory: LinearFactory):
        super().__init__()
        if spec.head_dim % 2:
            raise ValueError(f"hidden / heads = {spec.head_dim}: rotary positions need an even head width")
        self.base, self.heads, self.width = spec.rope_base, spec.heads // factory.shards, spec.head_dim
        self.query = factory.make(spec.hidden, spec.hidden, split="column", std=spec.init_std)
        self.key_value = factory.make(spec.hidden, 2 * spec.hidden, split="column", std=spec.init_std)

    @torch.no_grad()
    def start_at_itself(self) -> None:
        """Start with the queries' weights as keys too, so that a token attends to itself above all.

        A memory that writes what attention made (MAC) starts with keys that differ from token to token then;
        random weights attend to everything alike, and all keys of a segment are its mean.
        """
        query, key_value = (cast(Tensor, projection.weight) for projection in (self.query, self.key_value))
        key_value.unflatten(0, (self.heads, 2, self.width))[:, 0] = query.unflatten(0, (self.heads, self.width))

    def queries(self, x: Tensor) -> Tensor:
        """[B, T, d] -> [B, T, N, D]."""
        return self.query(x).unflatten(-1, (self.heads, self.width))

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, d] -> two of [B, T, N, D]."""
        key, value = self.key_value(x).unflatten(-1, (self.heads, 2, self.width)).unbind(-2)
        return key, value

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [..., T, N, D] at `positions` [..., T]."""
        return rotate(x, rotary_table(positions, self.width, self.base))


class SlidingWindow(AttentionHeads):
    """Windowed attention before its output projection: x [B, T, d] -> [B, T, N, D].

    State: {"key", "value": [B, w-1, N, D], "real": [B, w-1, 1] 1 where a row is a token}.
    """

    def __init__(self, spec: BlockSpec, factory: LinearFactory):
        super().__init__(spec, factory)
        self.window = spec.window

    def forward(
        self,
        x: Tensor,
        persistent: Tensor | None,
        state: Tree | None,
        documents: Documents | None,
        carry: StateCarry = LOCAL,
    ) -> tuple[Tensor, Tree]:
        key, value = self.keys_values(x)
        stream = {"key": key, "value": value, "real": x.new_ones(*x.shape[:2], 1)}
        context = carry.left_contexts(stream, self.window - 1, state or {}, documents)
        after = {name: last_rows(context[name], rows, documents) for name, rows in stream.items()}
        nothing_before = state is None and carry.before is None
        if nothing_before and x.shape[1] < self.window:
            context = {name: rows[:, :0] for name, rows in context.items()}
        key, value, real = (torch.cat([context[name], stream[name]], 1) for name in ("key", "value", "real"))
        alike = documents is None and nothing_before
        seen = _documents_of_keys(documents, real[..., 0] > 0, x.shape[1])[: 1 if alike else None]
        places = torch.arange(key.shape[1], device=x.device)
        plain = self.queries(x)
        query, key = self.turn(plain, places[-x.shape[1] :]), self.turn(key, places)
        if persistent is None:
            return self._blocks(query, key, value, seen, None), after
        # persistent rows have no place, so they meet the unturned query: in channels of their own, zero elsewhere
        always = self.keys_values(persistent.to(x.dtype)[None])
        beside = pad(always[0], (self.width, 0)), pad(always[1], (0, self.width))
        wide_key, wide_value = pad(key, (0, self.width)), pad(value, (0, self.width))
        out = self._blocks(torch.cat([query, plain], -1), wide_key, wide_value, seen, beside)
        return out[..., : self.width], after

    def _blocks(
        self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor, always: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Blocks of `size` queries, each against the keys from `reach` before its first to its last."""
        batch, tokens = query.shape[:2]
        reach = key.shape[1] - tokens
        size = min(max(self.window - 1, 1), tokens)
        blocks = -(-tokens // size)
        spare = blocks * size - tokens
        q = pad(query, (0, 0, 0, 0, 0, spare)).unflatten(1, (blocks, size))
        k, v = (_pairs(pad(x, (0, 0, 0, 0, 0, spare)), blocks, size) for x in (key, value))
        mask = self._mask(seen, reach, blocks, size, spare)
        if always is not None:
            rows = [p[:, None].expand(batch, blocks, -1, -1, -1) for p in always]
            k, v = torch.cat([rows[0], k], 2), torch.cat([rows[1], v], 2)
            mask = pad(mask, (always[0].shape[1], 0), value=True)
        mask = mask.expand(batch, -1, -1, -1).flatten(0, 1)[:, None]
        out = attend(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), mask, scale=self.width**-0.5)
        return out.unflatten(0, (batch, blocks)).flatten(1, 2)[:, :tokens]

    def _mask(self, seen: Tensor, reach: int, blocks: int, size: int, spare: int) -> Tensor:
        """[B or 1, blocks, size, reach + size]: same document, at most window-1 back, not ahead."""
        query = torch.arange(size, device=seen.device)[:, None] + reach
        slot = torch.arange(reach + size, device=seen.device)
        near = (slot <= query) & (slot > query - self.window)
        ids = torch.cat([seen, seen[:, -1:].expand(-1, spare)], 1)
        queries = ids[:, reach:].unflatten(1, (blocks, size))
        return near & (queries[..., :, None] == _pairs(ids, blocks, size)[..., None, :])


def _documents_of_keys(documents: Documents | None, real: Tensor, tokens: int) -> Tensor:
    """[B, K] number of each key's document in its row, -1 where a row before the `tokens` here is none."""
    number = torch.zeros(real.shape[0], tokens, dtype=torch.int64)
    for row, starts in zip(number, documents.starts if documents else (), strict=False):
        row[torch.tensor(starts)] = 1
        row[0] = 0
    before = real[:, : real.shape[1] - tokens].long() - 1
    return torch.cat([before, number.cumsum(1).to(real.device)], 1)


def _pairs(x: Tensor, blocks: int, size: int) -> Tensor:
    """[B, reach + blocks size, ...] -> [B, blocks, reach + size, ...], the keys of each block.

    With more than one block size equals reach (or reach is 0), so a block's keys are two neighbouring blocks.
    """
    if blocks == 1:
        return x[:, None]
    parts = x.unflatten(1, (-1, size))
    return parts if parts.shape[1] == blocks else torch.cat([parts[:, :-1], parts[:, 1:]], 2)


class WindowAttention(nn.Module):
    """The block of letter w: sliding window with persistent rows, output projection."""

    def __init__(self, spec: BlockSpec, factory: LinearFactory, generator: torch.Generator):
        super().__init__()
        self.attention = SlidingWindow(spec, factory)
        count = spec.persistent_tokens
        self.persistent = persistent_rows(count, spec.hidden, generator) if count else None
        self.out = factory.make(spec.hidden, spec.hidden, split="row", std=spec.out_std)

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
        heads, after = self.attention(x, self.persistent, state, documents, carry)
        return self.out(heads.flatten(-2)), after if return_state else None
