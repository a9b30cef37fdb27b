"""If these fail, a shipped run starts past the stability bound of its memory: its states are chaotic from step one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from miras_megatron.config.load import load_run
from miras_megatron.config.rule_table import facts_of
from miras_megatron.config.schema import MEMORY_LETTERS, Memory, Model, Run
from miras_megatron.config.stability import inner_lr_max, stable_lr
from miras_megatron.memory import MemoryInputs, Rule, make_rule, scan_memory
from miras_megatron.memory.curvature import chunk_curvature, stable_rate
from miras_megatron.memory.state import replace_state

RUNS = sorted((Path(__file__).resolve().parents[2] / "configs/runs").glob("*.yaml"))
ITERATIONS = 10
Weights = tuple[Tensor, ...]


def unit_keys(chunk: int, width: int, parallel: bool, generator: torch.Generator) -> Tensor:
    """[C, D] keys as the layer makes them, SiLU and l2 norm; all the same one where `parallel`."""
    key = silu(torch.randn(1 if parallel else chunk, width, generator=generator, dtype=torch.float64))
    return (key / key.norm(dim=-1, keepdim=True)).expand(chunk, width)


def power_iteration(apply: Callable[[Weights], Weights], start: Weights) -> float:
    """Size of the largest eigenvalue of a linear map on weights."""
    vector, size = start, 0.0
    for _ in range(ITERATIONS):
        size = sum(float(x.square().sum()) for x in vector) ** 0.5
        vector = apply(tuple(x / size for x in vector))
        size = sum(float(x.square().sum()) for x in vector) ** 0.5
    return size


def one_chunk(rule: Rule, width: int, keys: Tensor, generator: torch.Generator, rate: float) -> float:
    """Top eigenvalue of a chunk's write as a function of the stored variable, by differences through the scan.

    For objectives steeper than l2 and retention that maps the variable, where J^T J is not the answer.
    """
    params = rule.init_params(1, width, generator=generator, dtype=torch.float64)
    values = unit_keys(len(keys), width, len({float(x) for x in keys[:, 0]}) == 1, generator)
    k, v = keys[None, :, None], values[None, :, None]
    gate = torch.ones(1, len(keys), 1, dtype=torch.float64)
    inputs = MemoryInputs(k, k, v, lr=rate * gate, delta=gate if "delta" in rule.gates else None)
    state = rule.init_state(params, 1)

    def written(weights: Sequence[Tensor]) -> Weights:
        begun = replace_state(state, weights=tuple(weights), anchor=tuple(weights))
        with torch.no_grad():
            _, after = scan_memory(rule, params, inputs, begun, chunk_size=len(keys))
        return tuple((old - new) / rate for old, new in zip(weights, after.weights, strict=True))

    here = tuple(w.detach().clone() for w in state.weights)
    base, step = written(here), 1e-4
    start = tuple(torch.randn(w.shape, generator=generator, dtype=w.dtype) for w in here)

    def apply(vector: Weights) -> Weights:
        moved = written([w + step * x for w, x in zip(here, vector, strict=True)])
        return tuple((a - b) / step for a, b in zip(moved, base, strict=True))

    return power_iteration(apply, start)


def curvature(rule: Rule, width: int, chunk: int, parallel: bool) -> float:
    """lambda of a chunk of the rule's memory at the start of training."""
    generator = torch.Generator().manual_seed(width + chunk)
    keys = unit_keys(chunk, width, parallel, generator)
    if rule.objective == "l2" and rule.retention == "decay":
        params = rule.init_params(1, width, generator=generator, dtype=torch.float64)
        return float(chunk_curvature(rule, params, keys[:, None], steps=ITERATIONS))
    return one_chunk(rule, width, keys, generator, rate=1e-9)


def bound(run: Run, parallel: bool) -> float:
    """2 (1 - m) / lambda, measured."""
    rule = make_rule(run.memory.rule, **run.memory.choices)
    momentum = run.memory.momentum_init if rule.momentum else 0.0
    return stable_rate(curvature(rule, run.model.head_dim, run.memory.chunk_size, parallel), momentum)


def memories() -> dict[str, Run]:
    """One run for each different memory that is shipped (Memora has a test of its own)."""
    found = {}
    for path in RUNS:
        if path.name == "quickstart.yaml":
            continue
        run = load_run([str(path)])
        if MEMORY_LETTERS & set(run.model.letters) and facts_of(run.memory).retention != "kl":
            choices = "-".join(f"{k}{v}" for k, v in run.memory.choices.items())
            found.setdefault(f"{run.memory.rule}{choices}-{run.model.head_dim}-{run.memory.chunk_size}", run)
    return found


MEMORIES = memories()
SELECTIVE = load_run([str(next(path for path in RUNS if path.name == "quickstart.yaml"))])
"""Writes a fact in one step, which no rate below the bound does when every token of a chunk could write: its gates
learn to keep the other tokens' rates far below lr_max. `miras-train` says so at its start."""


@pytest.mark.parametrize("parallel", [True, False], ids=["parallel", "random"])
@pytest.mark.parametrize("name", MEMORIES)
def test_every_shipped_rate_is_within_the_measured_bound(name: str, parallel: bool) -> None:
    """Past it the recurrence is chaotic and no precision helps (rules 1.10 and 12.5)."""
    assert inner_lr_max(MEMORIES[name]) <= bound(MEMORIES[name], parallel)


@pytest.mark.parametrize("parallel", [True, False], ids=["parallel", "random"])
def test_the_quickstarts_largest_rate_leaves_states_and_gradients_finite(parallel: bool) -> None:
    """It lies above the bound: if every gate were wide open for 8,192 tokens, nothing may overflow."""
    run, tokens = SELECTIVE, 8192
    generator = torch.Generator().manual_seed(0)
    rule, width = make_rule(run.memory.rule, **run.memory.choices), run.model.head_dim
    assert inner_lr_max(run) > bound(run, parallel)
    params = {name: x.requires_grad_() for name, x in rule.init_params(1, width, generator=generator).items()}
    keys = unit_keys(tokens, width, parallel, generator).float()[None, :, None].clone().requires_grad_()
    values = torch.randn(1, tokens, 1, width, generator=generator)
    gates = {"log_keep": 0.0, "momentum": 0.9, "lr": inner_lr_max(run)}
    opened = {name: torch.full((1, tokens, 1), value) for name, value in gates.items()}
    inputs = MemoryInputs(keys, keys, values, **opened)
    reads, state = scan_memory(rule, params, inputs, rule.init_state(params, 1), run.memory.chunk_size)
    (reads * torch.randn(reads.shape, generator=generator)).sum().backward()
    start = max(float(x.norm()) for name, x in params.items() if name.startswith("weight"))
    assert max(float(w.norm()) for w in state.weights) < 100 * start
    assert all(bool(torch.isfinite(x.grad).all()) for x in (keys, *params.values()) if x.grad is not None)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("rule", "init"), [("titans", None), ("titans", "wide_input"), ("titans", "unit"), ("omeganet", None)]
)
def test_the_closed_form_is_below_the_measured_bound(rule: str, init: str | None, depth: int) -> None:
    """memory.lr_max: null takes the closed form, for any depth and width."""
    options = {"window": 1} if rule == "omeganet" else {}
    memory = Memory(rule=rule, depth=depth, init=init, chunk_size=24, options=options)  # type: ignore[arg-type]
    run = Run(model=Model(block="lmm", hidden=48, heads=1), memory=memory)
    assert stable_lr(run) <= bound(run, parallel=True)
    assert stable_lr(run) >= bound(run, parallel=True) / 8
