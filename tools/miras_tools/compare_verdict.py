"""How far two runs may be apart before it is a failure: the published tolerances, and the verdict of a step.

Training is chaotic: the last bit of a sum that was added in another order grows from step to step, until two runs
have nothing in common but their quality. So a bound grows with the steps since the first that is compared, up to a
ceiling above what two good runs of one training are apart. docs/testing.md, "Two runs", has the table and its grounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["same-layout", "other-layout", "bf16"]
Verdict = Literal["equal", "drift", "failure"]
LOSS, NORM, PARAMETER = "loss", "grad_norm", "gradient of a parameter"


@dataclass(frozen=True)
class Bound:
    """Allowed relative difference: `first` at the first step, times `growth` a step, at most `ceiling`.

    Norms are above 0, so their relative difference never passes 1: a ceiling of 1 judges no more.
    """

    first: float
    growth: float = 1.0
    ceiling: float = 1.0

    def at(self, steps: int) -> float:
        """The bound `steps` after the first compared one."""
        if self.first == 0.0:
            return 0.0
        grown = math.log(self.first) + steps * math.log(self.growth)
        return self.ceiling if grown >= math.log(self.ceiling) else math.exp(grown)


@dataclass(frozen=True)
class Tolerance:
    """The bounds of one kind of comparison, by quantity, and the reason for them."""

    bounds: Mapping[str, Bound]
    reason: str


TOLERANCES: dict[Kind, Tolerance] = {
    "same-layout": Tolerance(
        {LOSS: Bound(0.0), NORM: Bound(0.0), PARAMETER: Bound(0.0)},
        "the same sums in the same order: every number is the same to its last bit",
    ),
    "other-layout": Tolerance(
        {LOSS: Bound(1e-6, 1.25, 0.05), NORM: Bound(5e-5, 1.25), PARAMETER: Bound(1e-4, 1.25)},
        "fp32 sums in another order: 1e-7 of the largest term, more of a sum whose terms cancel",
    ),
    "bf16": Tolerance(
        {LOSS: Bound(1e-3, 1.25, 0.05), NORM: Bound(1e-2, 1.25), PARAMETER: Bound(5e-2, 1.25)},
        "bf16 keeps 8 bits: every product's result is off by up to 0.4%, and with it all that comes after",
    ),
}
SMALLEST = 1e-3
"""share of the global gradient norm below which a parameter's gradient is compared with this instead of with itself:
what cancels to nearly nothing is mostly rounding"""


@dataclass(frozen=True)
class Difference:
    """One quantity in both runs."""

    quantity: str
    """loss, grad_norm, or the parameter's name"""
    a: float
    b: float
    relative: float
    allowed: float

    @property
    def verdict(self) -> Verdict:
        """equal: no difference at all; drift: within what is allowed."""
        return "equal" if self.relative == 0.0 else "drift" if self.relative <= self.allowed else "failure"

    def __str__(self) -> str:
        return (
            f"{self.quantity}: {self.a:.9g} and {self.b:.9g}, apart by {self.relative:.1e}, allowed {self.allowed:.1e}"
        )


@dataclass(frozen=True)
class StepVerdict:
    """One step of both runs."""

    step: int
    differences: tuple[Difference, ...]
    has_gradients: bool

    @property
    def verdict(self) -> Verdict:
        """The worst of its differences."""
        found = {difference.verdict for difference in self.differences}
        return "failure" if "failure" in found else "drift" if "drift" in found else "equal"

    @property
    def failures(self) -> list[Difference]:
        """What is outside, the parameter that is farthest outside first, then the rest as recorded."""
        outside = [d for d in self.differences if d.verdict == "failure"]
        return sorted(outside, key=lambda d: (d.quantity in (LOSS, NORM), -d.relative / max(d.allowed, 1e-300)))


def judge(step: int, first: int, a: Mapping[str, Any], b: Mapping[str, Any], kind: Kind) -> StepVerdict:
    """The verdict of a step.

    first  the first step that is compared; bounds grow from there
    a, b   the two runs' records of the step: loss, grad_norm and, where recorded, gradients
    """
    bounds = {quantity: bound.at(step - first) for quantity, bound in TOLERANCES[kind].bounds.items()}
    found = [_compare(name, float(a[name]), float(b[name]), bounds[name]) for name in (LOSS, NORM)]
    both = "gradients" in a and "gradients" in b
    if both:
        floor = SMALLEST * max(float(a[NORM]), float(b[NORM]))
        found += _parameters(a["gradients"], b["gradients"], bounds[PARAMETER], floor)
    return StepVerdict(step, tuple(found), both)


def _parameters(a: Mapping[str, Any], b: Mapping[str, Any], allowed: float, floor: float) -> Iterator[Difference]:
    """A parameter that only one of them has counts as infinitely far."""
    for name in [*a, *(name for name in b if name not in a)]:
        yield _compare(name, float(a.get(name, math.nan)), float(b.get(name, math.nan)), allowed, floor)


def _compare(quantity: str, a: float, b: float, allowed: float, floor: float = 0.0) -> Difference:
    """Relative to the larger; 0 only where both are the same number, or both none."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        relative = 0.0
    elif not (math.isfinite(a) and math.isfinite(b)):
        relative = math.inf
    else:
        scale = max(abs(a), abs(b), floor if math.isfinite(floor) else 0.0)
        relative = abs(a - b) / scale
    return Difference(quantity, a, b, relative, allowed)
