"""A session: the constant-size state of one stream of text, which any number of tokens in any cuts leads to.

The file holds tensors and plain values, nothing that can run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .carried import pack_states, unpack_states
from .plain_files import read_plain

SESSION_FORMAT = 1
KEYS = ("format", "model", "layout", "tensors", "tokens", "pending")
WAY_OUT = "name another --session, or remove the file to start a new one"


@dataclass
class Session:
    """Where a stream stands.

    states   pytree of every layer's state, batch 1; None before the first token
    tokens   tokens read so far
    pending  ids given out or put in that the model hasn't read yet
    """

    states: Any = None
    tokens: int = 0
    pending: tuple[int, ...] = ()

    def read(self, model: nn.Module, ids: list[int], cut: int = 512) -> Tensor:
        """Read `pending` and `ids`, at most `cut` tokens at once; logits [vocab] after the last, float32.

        Raises ValueError where there is nothing to read.
        """
        ids = [*self.pending, *ids]
        if not ids:
            raise ValueError("nothing to read: give a prompt")
        device = next(model.parameters()).device
        for start in range(0, len(ids), cut):
            part = torch.tensor([ids[start : start + cut]], device=device)
            with torch.inference_mode():
                logits, self.states = model(part, states=self.states, return_states=True)
            self.tokens += part.shape[1]
        self.pending = ()
        last: Tensor = logits[0, -1].float()
        return last

    @property
    def state_bytes(self) -> int:
        """Bytes of the state; the same after any number of tokens."""
        return sum(x.numel() * x.element_size() for x in pack_states(self.states)[1].values())

    def save(self, path: Path | str, model: str) -> None:
        """Write the session, whole or not at all; `model` names the checkpoint it belongs to."""
        layout, tensors = pack_states(self.states)
        part = f"{path}.part"
        content = {"format": SESSION_FORMAT, "model": model, "layout": layout, "tensors": tensors}
        torch.save(content | {"tokens": self.tokens, "pending": list(self.pending)}, part)
        os.replace(part, path)

    @classmethod
    def load(cls, path: Path | str, model: str, device: torch.device | str = "cpu") -> Session:
        """Read a session of `model`. Raises ValueError where it belongs to another or can't be read."""
        stored = read_plain(Path(path), KEYS)
        missing = [name for name in KEYS if name not in stored]
        if missing:
            raise ValueError(f"{path}: no session, {', '.join(missing)} missing; {WAY_OUT}")
        if stored["format"] != SESSION_FORMAT:
            raise ValueError(f"{path}: session format {stored['format']}; this version reads {SESSION_FORMAT}")
        if stored["model"] != model:
            raise ValueError(
                f"{path}: a session of {stored['model']}, not of {model}; name that checkpoint, or another --session"
            )
        try:
            states = unpack_states(stored["layout"], stored["tensors"])
            return cls(move_states(states, device), int(stored["tokens"]), tuple(map(int, stored["pending"])))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as e:
            reason = f"{type(e).__name__}: {e}"
            raise ValueError(
                f"{path}: damaged session, its state can't be put together ({reason}); {WAY_OUT}"
            ) from None


def move_states(states: Any, device: torch.device | str) -> Any:
    """A pytree of states on `device`; whole numbers, which describe rather than hold, stay on the host."""
    layout, tensors = pack_states(states)
    return unpack_states(layout, {k: x.to(device) if x.is_floating_point() else x for k, x in tensors.items()})
