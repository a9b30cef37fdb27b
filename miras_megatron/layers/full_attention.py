"""Full causal attention within documents: the Transformer++ baseline and letter a of patterns.

Its state grows with the sequence: it is the one block without constant state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from .block_spec import BlockSpec
from .carry import LOCAL, StateCarry
from .documents import CuSeqlens, Documents, join_trees
from .linear import LinearFactory
from .window_attention import AttentionHeads, attend

Tree = dict[str, Any]

BLOCK = 512
"""Queries that share one mask where keys of an earlier call come in."""


class FullAttention(nn.Module):
    """x [B, T, d] -> y [B, T, d]; rotary positions, causal within documents.

    State: {"key", "value": [B, S, N, D] unturned, right-aligned, "count": [B] int64 on the CPU, rows that are real}.
    """

    def __init__(self, spec: BlockSpec, factory: LinearFactory, generator: torch.Generator):
        super().__init__()
        self.attention = AttentionHeads(spec, factory)
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
        """x [B, T, d] -> y [B, T, d], and the state after the last token where asked for.

        Raises ValueError where a carry would bring its growing state from elsewhere.
        """
        if carry.before is not None or carry.passes_on:
            raise ValueError("full attention (letter a) needs whole sequences: its state grows with them")
        documents = Documents.of(cu_seqlens, *x.shape[:2])
        query = self.attention.queries(x)
        key, value = self.attention.keys_values(x)
        before = [0] * x.shape[0] if state is None else [int(c) for c in state["count"]]
        starts = documents.starts if documents is not None else ((0,),) * x.shape[0]
        if len(set(zip(before, starts, strict=True))) == 1:
            groups = [list(range(x.shape[0]))]
        else:
            groups = [[row] for row in range(x.shape[0])]
        heads, states = [], []
        for rows in groups:
            whole = slice(rows[0], rows[-1] + 1)
            old = {} if state is None else {name: state[name][whole] for name in ("key", "value")}
            out, after = self._rows(query[whole], key[whole], value[whole], old, before[rows[0]], starts[rows[0]])
            heads.append(out)
            states.append(after)
        longest = max(after["key"].shape[1] for after in states)
        y = self.out(torch.cat(heads).flatten(-2))
        return y, join_trees([right_aligned(after, longest) for after in states]) if return_state else None

    def _rows(
        self, query: Tensor, key: Tensor, value: Tensor, old: Tree, before: int, starts: tuple[int, ...]
    ) -> tuple[Tensor, Tree]:
        """Rows with the same documents, `before` tokens of whose first came in earlier calls."""
        if before:
            key, value = (
                torch.cat([old[n][:, -before:].to(x.dtype), x], 1) for n, x in (("key", key), ("value", value))
            )
        places = torch.arange(key.shape[1], device=key.device)
        turned = self.attention.turn(key, places)
        query = self.attention.turn(query, places[before:])
        out, borders = [], [*starts, query.shape[1]]
        for start, stop in zip(borders[:-1], borders[1:], strict=True):
            first = 0 if start == 0 else before + start
            keys = slice(first, before + stop)
            out.append(_causal(query[:, start:stop], turned[:, keys], value[:, keys]))
        first = 0 if starts[-1] == 0 else before + starts[-1]
        count = torch.full((key.shape[0],), key.shape[1] - first)
        return torch.cat(out, 1), {"key": key[:, first:], "value": value[:, first:], "count": count}


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Query t sees the keys up to its own; the last query stands at the last key."""
    tokens, extra = query.shape[1], key.shape[1] - query.shape[1]
    if extra == 0:
        return attend(query, key, value, causal=True)
    out = []
    for start in range(0, tokens, BLOCK):
        stop = min(start + BLOCK, tokens)
        ahead = torch.arange(extra + stop, device=key.device) - extra
        mask = ahead <= torch.arange(start, stop, device=key.device)[:, None]
        out.append(attend(query[:, start:stop], key[:, : extra + stop], value[:, : extra + stop], mask))
    return torch.cat(out, 1)


def kept_tokens(state: Tree) -> int:
    """Tokens that a layer's state has room for; 0 where it isn't full attention's."""
    return int(state["key"].shape[1]) if "count" in state else 0


def right_aligned(state: Tree, length: int) -> Tree:
    """A state of full attention with room for `length` tokens; any other layer's as it is."""
    if "count" not in state:
        return state
    spare = length - state["key"].shape[1]
    return {name: pad(x, (0, 0, 0, 0, spare, 0)) if name != "count" else x for name, x in state.items()}
