"""What is wrong with a step, and what the run does about it: judged before the update, alike on every rank.

training.on_nan         loss or gradient is no number
training.on_spike       loss or gradient norm far above the median of the last WINDOW good steps
training.on_divergence  a memory's state has run away (where the step looked inside)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from ..config.schema import Training

WINDOW = 64
"""good steps whose loss and gradient norm are remembered"""

ENOUGH = 16
"""of them, before a spike is called one: the first steps of a run fall fast"""

LONG = 100
"""steps among which patience counts the bad ones"""

Action = Literal["stop", "skip", "roll_back"]


SEVERITY: dict[str, int] = {"skip": 0, "roll_back": 1, "stop": 2}
"""Of two policies that want different things the stronger wins."""


@dataclass(frozen=True)
class Trouble:
    """Something wrong with a step: of what kind (nan, spike, divergence), why, and what is done about it."""

    kind: str
    reason: str
    action: Action

    def __str__(self) -> str:
        done = {"stop": "STOPPED", "skip": "SKIPPED", "roll_back": "ROLLED BACK"}[self.action]
        return f"{done} ({self.kind}): {self.reason}"


class Judge:
    """Remembers the last good steps of a run and tells a bad one from them."""

    def __init__(self, settings: Training) -> None:
        self._settings = settings
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._last: deque[bool] = deque(maxlen=LONG)
        self._since_saved = 0

    def judge(self, loss: float, norm: float, memory: Mapping[str, Mapping[str, float]]) -> Trouble | None:
        """What is wrong with a step of `loss` (nats a token) and gradient `norm`; None: it is good, and remembered.

        memory  layer -> quantity -> value, empty where the step didn't look inside
        """
        worst = max(self._complaints(loss, norm, memory), key=lambda found: SEVERITY[found.action], default=None)
        self._last.append(worst is not None)
        if worst is None:
            self._losses.append(loss)
            self._norms.append(norm)
            return None
        self._since_saved += 1
        patience = self._settings.patience
        if worst.action != "stop" and patience and max(self._since_saved, sum(self._last)) > patience:
            told = f"{worst.reason}; training.patience = {patience} bad steps among the last {LONG}, or since the last"
            return Trouble(worst.kind, f"{told} checkpoint, were there before it", "stop")
        return worst

    def saved(self) -> None:
        """A checkpoint is complete: the run got on."""
        self._since_saved = 0

    def counted(self) -> tuple[list[bool], int]:
        """The bad steps that patience counts; a roll back doesn't undo them."""
        return list(self._last), self._since_saved

    def count_on(self, counted: tuple[list[bool], int]) -> None:
        """Go on from `counted()`."""
        self._last, self._since_saved = deque(counted[0], maxlen=LONG), counted[1]

    def recent(self) -> dict[str, Any]:
        """What it remembers, for a checkpoint; which is saved then."""
        return {"losses": list(self._losses), "norms": list(self._norms), "bad": list(self._last)}

    def remember(self, recent: Mapping[str, Any]) -> None:
        """Go on from `recent()`; empty where a checkpoint has none."""
        self._losses = deque(map(float, recent.get("losses", ())), maxlen=WINDOW)
        self._norms = deque(map(float, recent.get("norms", ())), maxlen=WINDOW)
        self.count_on((list(map(bool, recent.get("bad", ()))), 0))

    def _complaints(self, loss: float, norm: float, memory: Mapping[str, Mapping[str, float]]) -> Iterator[Trouble]:
        """Everything that is wrong and not to be ignored."""
        settings = self._settings
        if not (math.isfinite(loss) and math.isfinite(norm)):
            yield Trouble("nan", f"loss is {loss}, gradient norm is {norm}", settings.on_nan)
            return
        if settings.on_divergence != "ignore" and (reason := self._divergence(memory)):
            yield Trouble("divergence", reason, settings.on_divergence)
        if settings.on_spike != "ignore" and (reason := self._spike(loss, norm)):
            yield Trouble("spike", reason, settings.on_spike)

    def _divergence(self, memory: Mapping[str, Mapping[str, float]]) -> str:
        limit = self._settings.state_norm_limit
        norms = {layer: values["state_norm"] for layer, values in memory.items() if "state_norm" in values}
        far = {layer: norm for layer, norm in norms.items() if not norm <= limit}
        if not far:
            return ""
        layer, norm = next(iter(far.items()))
        return f"the memory of {layer} has norm {norm:.4g}, above training.state_norm_limit = {limit:g}"

    def _spike(self, loss: float, norm: float) -> str:
        if len(self._losses) < ENOUGH:
            return ""
        usual, usual_norm = median(self._losses), median(self._norms)
        if loss > usual + self._settings.spike_loss:
            return f"loss {loss:.4f} is {loss - usual:.2f} nats above the median of the last {len(self._losses)}"
        if norm > usual_norm * self._settings.spike_norm:
            times = norm / max(usual_norm, 1e-30)
            return f"gradient norm {norm:.4g} is {times:.3g} times the median of the last {len(self._norms)}"
        return ""
