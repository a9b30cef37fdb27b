"""What a model carries from token to token, as a transformers Cache: constant in size, row by row.

Rows of a batch may have seen different numbers of tokens: padding is taken out before anything is computed, so a row's
memory, its place in a chunk and its convolution tails are those it would have alone.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from .full_attention import kept_tokens, right_aligned
from .lane_states import collect_lanes
from .memory import MemoryState

CACHE_FORMAT = 1

States = dict[int, Any]
"""layer (from 1) -> its state, a pytree with rows in dim 0; LAST -> the last token's hidden state"""

LAST, HIDDEN = 0, "hidden"
"""What comes out at a row's trailing pads, even where its last token came in an earlier call."""


class MirasCache(Cache):
    """The states of all layers and rows. A state is never changed in place, so copies of a cache share what they have.

    columns  tokens and pads seen, what transformers calls the sequence's length
    """

    is_compileable = False
    is_croppable = False

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.columns = 0
        self._places: dict[int, tuple[States, int]] = {}
        self._rows = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> MirasCache:
        """Its own from now on, and sharing what it has: also of states that gradients go through."""
        return copy.copy(self)

    # -- for the model -------------------------------------------------------------------------------
    def started(self, row: int) -> bool:
        """Whether the row has seen a token."""
        return row in self._places

    def take(self, rows: Sequence[int]) -> States:
        """The states of `rows`, in their order; empty where they have seen no token (all or none of them have)."""
        if not self.started(rows[0]):
            return {}
        self._level(rows)
        found: States = collect_lanes(self._places, rows)
        return found

    def last(self, rows: Sequence[int]) -> torch.Tensor:
        """[G, d] what came out at the last token of `rows`, all of which have seen one."""
        held = {id(self._places[row][0]): {LAST: self._places[row][0][LAST]} for row in rows}
        found = collect_lanes({row: (held[id(self._places[row][0])], self._places[row][1]) for row in rows}, rows)
        hidden: torch.Tensor = found[LAST][HIDDEN]
        return hidden

    def _level(self, rows: Sequence[int]) -> None:
        """Bring what full attention keeps of `rows` to one length: rows that are computed apart differ in it."""
        trees = {id(self._places[row][0]): self._places[row][0] for row in rows}
        longest = {
            layer: max(kept_tokens(tree[layer]) for tree in trees.values()) for layer in self._places[rows[0]][0]
        }
        if len(trees) == 1 or not any(longest.values()):
            return
        padded = {key: {n: right_aligned(x, longest[n]) for n, x in tree.items()} for key, tree in trees.items()}
        levelled = {row: (padded[id(self._places[row][0])], self._places[row][1]) for row in rows}
        self._places = self._places | levelled  # a new dict: copies of this cache hold the old one

    def put(self, rows: Sequence[int], states: States) -> None:
        """What `rows` carry now."""
        self._places = self._places | {row: (states, place) for place, row in enumerate(rows)}

    def expect(self, rows: int) -> None:
        """Raises ValueError for a batch of another size than the cache's."""
        if self._rows not in (0, rows):
            raise ValueError(
                f"a batch of {rows} rows with a cache of {self._rows}: give the cache of these rows, or "
                "cache.batch_repeat_interleave(n) first where each row is read n times"
            )

    def saw(self, rows: int, columns: int) -> None:
        """A batch of `rows` went `columns` further."""
        self._rows = rows
        self.columns += columns

    # -- for transformers ----------------------------------------------------------------------------
    def __len__(self) -> int:
        return len(next(iter(self._places.values()))[0].keys() - {LAST}) if self._places else 0

    @property
    def is_initialized(self) -> bool:
        """Whether any token was seen."""
        return bool(self._places)

    @property
    def is_sliding(self) -> list[bool]:
        """No layer's length is bounded."""
        return [False] * len(self)

    @property
    def is_linear(self) -> list[bool]:
        """No: of a linear cache transformers takes the length to mean nothing, and gives old tokens again."""
        return [False]

    @property
    def max_batch_size(self) -> int:
        """Rows."""
        return self._rows

    def get_seq_length(self, *unused: Any, **also: Any) -> int:
        """Tokens and pads seen."""
        return self.columns

    def get_mask_sizes(self, query: Any, *unused: Any, **also: Any) -> tuple[int, int]:
        """(columns with these, offset)."""
        new = query if isinstance(query, int) else len(query)
        return self.columns + new, 0

    def get_max_cache_shape(self, *unused: Any, **also: Any) -> int:
        """-1: any number of tokens."""
        return -1

    def get_max_length(self, *unused: Any, **also: Any) -> None:
        """None: any number of tokens."""

    def update(self, *unused: Any, **also: Any) -> Any:
        """Not this way: layers hand on states, not keys and values."""
        raise ValueError("a Miras cache holds states, not keys and values: only its own model writes to it")

    def crop(self, *unused: Any, **also: Any) -> None:
        """Can't be done: a memory doesn't forget its last tokens on demand."""
        raise ValueError("a memory can't take tokens back: generate without assistants, or from an earlier cache")

    def reset(self) -> None:
        """As before the first token."""
        self.columns, self._rows, self._places = 0, 0, {}

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i goes on from what row beam_idx[i] carries."""
        self._choose(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        self._choose([row for row in range(self._rows) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only these rows."""
        chosen = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self._choose(chosen.tolist())

    def _choose(self, rows: list[int]) -> None:
        self._places = {new: self._places[old] for new, old in enumerate(rows) if old in self._places}
        self._rows = len(rows)

    def offload(self, *unused: Any, **also: Any) -> None:
        """Nothing: states are small, and used at every token."""

    def prefetch(self, *unused: Any, **also: Any) -> None:
        """Nothing."""

    # -- files ---------------------------------------------------------------------------------------
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache, whole or not at all: tensors and plain values."""
        rows = sorted(self._places)
        states = self.take(rows) if rows else {}
        part = f"{os.fspath(path)}.part"
        content = {"format": CACHE_FORMAT, "columns": self.columns, "batch": self._rows, "rows": rows}
        torch.save(content | {"states": _plain(states)}, part)
        os.replace(part, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: Devices = "cpu") -> MirasCache:
        """Read what `save` wrote, to one device or to each layer's; nothing is unpickled but tensors.

        Raises ValueError for another file. A model's `load_cache` knows the devices.
        """
        stored = _read(path)
        cache = cls()
        try:
            cache.columns, cache._rows = int(stored["columns"]), int(stored["batch"])
            if stored["rows"]:
                cache.put(stored["rows"], {n: _states(x, _device(device, n)) for n, x in stored["states"].items()})
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{os.fspath(path)}: no whole Miras cache ({type(error).__name__})") from None
        return cache


Devices = torch.device | str | dict[int, torch.device]
"""One for all, or layer (from 1) -> its device, LAST -> that of what comes out."""


def _device(devices: Devices, layer: int) -> torch.device:
    return devices[layer] if isinstance(devices, dict) else torch.device(devices)


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a file of `MirasCache.save`; bytes of something else may raise anything when unpickled."""
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"{os.fspath(path)}: no Miras cache: it can't be read ({type(error).__name__})") from None
    if not isinstance(stored, dict) or stored.get("format") != CACHE_FORMAT:
        raise ValueError(f"{os.fspath(path)}: not a Miras cache of format {CACHE_FORMAT}")
    return stored


MEMORY = "memory state"
"""Key that marks a MemoryState among plain dicts."""


def _plain(tree: Any) -> Any:
    """MemoryStates as dicts of tensors."""
    if isinstance(tree, MemoryState):
        return {MEMORY: tree.detach().tensors()}
    if isinstance(tree, dict):
        return {name: _plain(part) for name, part in tree.items()}
    return tree.detach() if isinstance(tree, torch.Tensor) else tree


def _states(tree: Any, device: torch.device) -> Any:
    """The inverse of `_plain`; whole numbers, which describe rather than hold, stay on the host."""
    if isinstance(tree, dict) and MEMORY in tree:
        return MemoryState.from_tensors(_states(tree[MEMORY], device))
    if isinstance(tree, dict):
        return {name: _states(part, device) for name, part in tree.items()}
    return tree.to(device) if isinstance(tree, torch.Tensor) and tree.is_floating_point() else tree
