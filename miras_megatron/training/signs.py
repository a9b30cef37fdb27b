"""Signs of life of a rank's main thread: where it is, and that it moves. Counted here, watched by `watchdog`.

A sign is one addition. The layers of a model give one each time they are passed, forward and backward, so that a step
of hours is told from one that hangs.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import current_thread, main_thread
from typing import Any

from torch import Tensor, nn


@dataclass
class Signs:
    """What this process has told so far.

    place  "starting", "step 12", "validating", "saving a checkpoint"
    step   the update that is under way or was last; 0: none yet
    count  of all signs
    behind of those that other threads would have given: whoever waits for such a thread passes them on
    """

    place: str = "starting"
    step: int = 0
    count: int = 0
    behind: int = 0


SIGNS = Signs()
"""Of this process: a process has one main thread, and trains one model at a time."""


def begin_anew() -> None:
    """A run begins in this process."""
    SIGNS.place, SIGNS.step, SIGNS.count, SIGNS.behind = "starting", 0, 0, 0


def alive(place: str | None = None, step: int | None = None) -> None:
    """The main thread moves; it is at `place` in update `step` (None: where it was). Other threads give no sign.

    A checkpoint that is written behind the run would hide a step that hangs.
    """
    if current_thread() is not main_thread():
        SIGNS.behind += 1
        return
    SIGNS.count += 1
    if place is not None:
        SIGNS.place = place
    if step is not None:
        SIGNS.step = step


def give_signs(model: nn.Module) -> None:
    """Let every layer of this stage of `model` give a sign when it is passed, forward and backward."""
    for layer in model.decoder.layers:  # type: ignore[union-attr]
        layer.register_forward_hook(_passed)


def _passed(layer: nn.Module, inputs: Any, output: Any) -> None:
    alive()
    hidden = output[0] if isinstance(output, tuple) else output
    if isinstance(hidden, Tensor) and hidden.requires_grad:
        hidden.register_hook(_passed_back)


def _passed_back(gradient: Tensor) -> None:
    alive()
