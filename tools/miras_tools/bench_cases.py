"""What miras-bench measures: cases, and the operations counted for them. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

CHECK_LIMIT = 1e-9
EXPANSION = 4
TILE = 64
"""tokens that the scan walks at once, whatever the chunk"""


@dataclass(frozen=True)
class Case:
    """One measurement: forward plus backward of `tokens` tokens, batch 1, float32.

    side: "layer" ours with the projections that the peer's module has; "peer" titans-pytorch; "scan" scan_memory alone
    counted: whether `operations` knows the rule's products
    """

    side: str
    rule: str
    heads: int
    head_dim: int
    tokens: int
    chunk_size: int = 64
    options: dict[str, Any] = field(default_factory=dict)
    counted: bool = True

    def title(self) -> str:
        options = "".join(f" {name} {value}" for name, value in self.options.items())
        shape = f"{self.heads} x {self.head_dim}, chunk {self.chunk_size}, {self.tokens} tokens"
        return f"{self.side} {self.rule}{options}, {shape}"


def shapes(quick: bool) -> list[tuple[int, int, int]]:
    """heads, head width, tokens."""
    return [(2, 16, 128)] if quick else [(4, 64, 4096), (1, 256, 4096)]


def paired_cases(quick: bool) -> list[Case]:
    """Ours and the peer's layer, neighbours."""
    return [Case(side, "titans", *shape) for shape in shapes(quick) for side in ("layer", "peer")]


def scan_cases(quick: bool) -> list[Case]:
    """Our scan alone: the rule of the paired rows, then what has no peer."""
    cases = [Case("scan", "titans", *shape) for shape in shapes(quick)]
    first = shapes(quick)[0]
    for change in _varied(quick):
        cases.append(Case("scan", **{**dict(zip(("heads", "head_dim", "tokens"), first, strict=True)), **change}))
    return cases


def _varied(quick: bool) -> Iterator[dict[str, Any]]:
    if not quick:
        yield from ({"rule": "titans", "chunk_size": size} for size in (16, 256))
        yield from ({"rule": "titans", "options": {"depth": depth}} for depth in (1, 3, 4))
        yield {"rule": "yaad"}
        yield from ({"rule": rule, "counted": False} for rule in ("moneta", "memora"))
    yield {"rule": "deltanet", "counted": False}


def operations(depth: int, momentum: bool, head_dim: int, chunk_size: int) -> float:
    """Multiply-adds times 2 of one token and head of a fused rule, forward plus backward (spec of the tiled form).

    For each matrix in x out, products of 2 in out: forward 1 anchor, 1 more for all but the first (what arrives at the
    hidden activation), r read and r write with r = 2 with momentum, else 1; backward the same again but for the top
    (recomputed) and 2r read side, 2r update side, 2 anchor, 2 more for all but the first. And 8 masked ones of
    2 c (in + out) / 2, full c x c. Depth 2 with momentum: 11 + 32 products and 16 c (in + out). Gates, norms and
    activations are not counted.
    """
    rows, tile = 1 + momentum, min(chunk_size, TILE)
    hidden = EXPANSION * head_dim
    widths = [head_dim, *[hidden] * (depth - 1), head_dim]
    total = -2.0 * widths[-2] * widths[-1]
    for i, (width, out) in enumerate(zip(widths, widths[1:], strict=False)):
        forward = 1 + bool(i) + 2 * rows
        backward = forward + 4 * rows + 2 + 2 * bool(i)
        total += 2.0 * width * out * (forward + backward) + 8.0 * tile * (width + out)
    return total
