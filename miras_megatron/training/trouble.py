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

Action = Literal["stop", "skip", "roll_back"]


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
    """Remembers the last good steps of a run and tells a bad one from them.

    bad  steps skipped and rolled back since the last checkpoint
    """

    def __init__(self, settings: Training) -> None:
        self._settings = settings
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self.bad = 0

    def judge(self, loss: float, norm: float, memory: Mapping[str, Mapping[str, float]]) -> Trouble | None:
        """What is wrong with a step of `loss` (nats a token) and gradient `norm`; None: it is good, and remembered.

        memory  layer -> quantity -> value, empty where the step didn't look inside
        """
        for kind, wanted, reason in self._complaints(loss, norm, memory):
            self.bad += 1
            patience = self._settings.patience
            if wanted != "stop" and patience and self.bad > patience:
                told = f"{reason}; {patience} steps since the last checkpoint were bad before it (training.patience)"
                return Trouble(kind, told, "stop")
            return Trouble(kind, reason, wanted)
        self._losses.append(loss)
        self._norms.append(norm)
        return None

    def saved(self) -> None:
        """A checkpoint was begun: the run got on."""
        self.bad = 0

    def recent(self) -> dict[str, list[float]]:
        """What it remembers, for a checkpoint."""
        return {"losses": list(self._losses), "norms": list(self._norms)}

    def remember(self, recent: Mapping[str, Any]) -> None:
        """Go on from `recent()`; empty where a checkpoint has none."""
        self._losses = deque(map(float, recent.get("losses", ())), maxlen=WINDOW)
        self._norms = deque(map(float, recent.get("norms", ())), maxlen=WINDOW)

    def _complaints(
        self, loss: float, norm: float, memory: Mapping[str, Mapping[str, float]]
    ) -> Iterator[tuple[str, Action, str]]:
        """(kind, action, reason) of everything that is wrong and not to be ignored, the worst first."""
        settings = self._settings
        if not (math.isfinite(loss) and math.isfinite(norm)):
            yield "nan", settings.on_nan, f"loss is {loss}, gradient norm is {norm}"
            return
        if settings.on_divergence != "ignore" and (reason := self._divergence(memory)):
            yield "divergence", settings.on_divergence, reason
        if settings.on_spike != "ignore" and (reason := self._spike(loss, norm)):
            yield "spike", settings.on_spike, reason

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
