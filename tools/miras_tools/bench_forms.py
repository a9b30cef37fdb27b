"""How far the cheaper chunk forms are from the exact ones: Memora's linear chunk and Moneta's frozen norm.

Both forms are the papers' own way to train; the exact ones walk token by token. The distance is that of the reads,
relative to the exact reads, with gates as a layer makes them at its start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import normalize, silu

from miras_megatron.memory import MemoryInputs, make_rule, scan_memory

EXACT = {"memora": {"kl_form": "exact"}, "moneta": {"link_read": "token"}}
"""rule -> the choices of its exact form"""
TOKENS, HEADS, WIDTH = 256, 4, 64


@dataclass(frozen=True)
class Distance:
    """One row: ||y - y_exact|| / ||y_exact||."""

    rule: str
    chunk_size: int
    lr: float
    keep: float
    distance: float


def distances() -> Iterator[Distance]:
    """Every rule, with and without forgetting, small and large rates, short and long chunks."""
    for rule in EXACT:
        for keep in (1.0, 0.999):
            for lr in (1e-4, 1e-3, 1e-2):
                for chunk_size in (16, 64):
                    yield Distance(rule, chunk_size, lr, keep, measure(rule, chunk_size, lr, keep))


def measure(name: str, chunk_size: int, lr: float, keep: float) -> float:
    """The distance of one form, in float64 on random values and keys as a layer makes them."""
    generator = torch.Generator().manual_seed(0)
    cheap, exact = make_rule(name), make_rule(name, **EXACT[name])
    params = cheap.init_params(HEADS, WIDTH, generator=generator, dtype=torch.float64)
    q, k, v = torch.randn(3, 1, TOKENS, HEADS, WIDTH, generator=generator, dtype=torch.float64)
    gate = torch.ones(1, TOKENS, HEADS, dtype=torch.float64)
    inputs = MemoryInputs(_unit(q), _unit(k), v, log_keep=(gate * keep).log(), lr=gate * lr)
    with torch.no_grad():
        reads = [scan_memory(r, params, inputs, r.init_state(params, 1), chunk_size)[0] for r in (cheap, exact)]
    return float((reads[0] - reads[1]).norm() / reads[1].norm())


def _unit(x: torch.Tensor) -> torch.Tensor:
    return normalize(silu(x), dim=-1)


def table(rows: list[Distance]) -> str:
    """The rows as a Markdown table."""
    lines = ["| rule | chunk | lr | keep | distance of reads |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {r.rule} | {r.chunk_size} | {r.lr:g} | {r.keep:g} | {r.distance:.1e} |" for r in rows]
    return "\n".join(lines)
