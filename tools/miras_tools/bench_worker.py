"""One job of miras-bench in a process of its own: `python -m miras_tools.bench_worker JSON` prints one JSON line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, rms_norm, silu

from miras_megatron.layers.backends import use_cpu_kernel
from miras_megatron.layers.head_norm import unit
from miras_megatron.layers.spans import walk_spans
from miras_megatron.memory import MemoryInputs, MemoryState, make_rule, replay_scan, scan_memory
from miras_megatron.memory.oracle import scan_memory as oracle_scan

from .bench_cases import EXPANSION, Case

RATES = {"log_keep": -0.01, "momentum": 0.3, "lr": 4e-4, "lr_prev": 4e-4, "delta": 1.0}
"""gates are drawn from 0 to these: inside the bound of stability, so that nothing overflows"""
CHECKPOINT_EVERY = 8
"""chunks between two kept states: what our layers have by default"""
MEASURED = 3
"""timed passes after the first, which warms up"""


def main(argument: str) -> dict[str, Any]:
    """{"job": "check" | "measure", "threads": n, "case": {...}}."""
    job = json.loads(argument)
    torch.set_num_threads(job["threads"])
    use_cpu_kernel()
    return {"largest_error": check()} if job["job"] == "check" else measure(Case(**job["case"]))


def check() -> float:
    """The largest difference of the fast scan from the oracle, reads and gradients, relative to the largest value."""
    return max(_check(Case("scan", rule, 2, 5, 23, 8)) for rule in ("titans", "yaad", "moneta", "memora", "deltanet"))


def _check(case: Case) -> float:
    results = []
    for scan in (scan_memory, oracle_scan):
        rule, params, inputs = _memory(case, torch.float64)
        reads, _ = scan(rule, params, inputs, rule.init_state(params, 1), chunk_size=case.chunk_size)
        leaves = [inputs.q, inputs.k, inputs.v, *params.values()]
        grads = torch.autograd.grad(reads.square().sum(), leaves, allow_unused=True)
        results.append([reads, *(g for g in grads if g is not None)])
    pairs = zip(*results, strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-6)) for a, b in pairs)


def _memory(case: Case, dtype: torch.dtype) -> tuple[Any, dict[str, Tensor], MemoryInputs]:
    """The rule, its parameters and random inputs of one scan, all requiring gradients."""
    generator = torch.Generator().manual_seed(0)
    rule = make_rule(case.rule, **case.options)
    params = rule.init_params(case.heads, case.head_dim, generator=generator, dtype=dtype)
    params = {name: x.requires_grad_() for name, x in params.items()}

    def draw(*shape: int) -> Tensor:
        return torch.randn(1, case.tokens, case.heads, *shape, generator=generator, dtype=dtype)

    q, k = (normalize(silu(draw(case.head_dim)), dim=-1) for _ in range(2))
    gates = {
        name: torch.rand(1, case.tokens, case.heads, generator=generator, dtype=dtype) * RATES[name]
        for name in rule.gates
    }
    inputs = MemoryInputs(q, k, draw(case.head_dim), **gates)
    return rule, params, inputs.map(lambda x: x.requires_grad_())


def measure(case: Case) -> dict[str, Any]:
    """Seconds of wall and CPU a pass, MiB above import, and the rate of matrix products around it, in FLOP/s."""
    imported = {"scan": _import_nothing, "layer": _import_nothing, "peer": _import_peer}[case.side]()
    _load_autograd()
    before = peak_mib()
    forward = {"scan": _scan_pass, "layer": _layer_pass, "peer": _peer_pass}[case.side](case, imported)
    gradient = _gradient(case)
    wall, cpu, peak, rate = [], [], 0.0, 0.0
    for turn in range(1 + MEASURED):
        if turn == 1:
            peak, rate = peak_mib() - before, product_rate(case)
        started, busy = time.perf_counter(), time.process_time()
        torch.autograd.backward(forward(), gradient)
        wall.append(time.perf_counter() - started)
        cpu.append(time.process_time() - busy)
    rate = (rate + product_rate(case)) / 2.0
    return {"seconds": min(wall[1:]), "cpu_seconds": min(cpu[1:]), "peak_mib": peak, "rate": rate}


def _load_autograd() -> None:
    """A first backward from a given gradient imports sympy, 35 MiB of modules: part of import, for both sides."""
    torch.autograd.backward(torch.ones(1, requires_grad=True) * 2.0, torch.ones(1))


def _gradient(case: Case) -> Tensor:
    """dl/dy of the pass."""
    wide = (case.heads, case.head_dim) if case.side == "scan" else (case.heads * case.head_dim,)
    return torch.randn(1, case.tokens, *wide, generator=torch.Generator().manual_seed(2))


def product_rate(case: Case) -> float:
    """FLOP per second of CPU time of the tile's largest product, 64 tokens x D x 4D for every head, in cache."""
    heads, width, hidden = case.heads, case.head_dim, EXPANSION * case.head_dim
    left, right = torch.randn(heads, 64, width), torch.randn(heads, width, hidden)
    out, each = torch.bmm(left, right), 2.0 * heads * 64 * width * hidden
    count = max(1, int(3e9 / each))
    started = time.process_time()
    for _ in range(count):
        torch.bmm(left, right, out=out)
    return each * count / (time.process_time() - started)


def peak_mib() -> float:
    """The most memory this process ever held; VmHWM, since ru_maxrss keeps that of the parent over exec."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024.0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2.0**20 if sys.platform == "darwin" else 2.0**10)


def _import_nothing() -> None:
    return None


def _import_peer() -> Any:
    from titans_pytorch import NeuralMemory

    return NeuralMemory


def _scan_pass(case: Case, imported: None) -> Callable[[], Tensor]:
    rule, params, inputs = _memory(case, torch.float32)
    return lambda: scan_memory(rule, params, inputs, rule.init_state(params, 1), chunk_size=case.chunk_size)[0]


def _layer_pass(case: Case, imported: None) -> Callable[[], Tensor]:
    layer = _Layer(case)
    return _module_pass(layer, case)


def _peer_pass(case: Case, imported: Any) -> Callable[[], Tensor]:
    """Its module with gradients at the weights of every chunk's start (batch_size), which is our `chunk_size`."""
    torch.manual_seed(0)
    module = imported(
        dim=case.heads * case.head_dim,
        dim_head=case.head_dim,
        heads=case.heads,
        chunk_size=case.chunk_size,
        batch_size=case.chunk_size,
        momentum=True,
        default_step_transform_max_lr=1e-2,
        default_model_kwargs={"depth": 2, "expansion_factor": float(EXPANSION)},
    )
    forward = _module_pass(module, case)
    return lambda: forward()[0]


def _module_pass(module: nn.Module, case: Case) -> Callable[[], Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, case.tokens, case.heads * case.head_dim, generator=generator).requires_grad_()
    return lambda: module(x)


class _Layer(nn.Module):
    """Our scan with the projections of the peer's module: norm, q, k, v, gates, a gate on each head's read, output."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.case, width = case, case.heads * case.head_dim
        self.rule = make_rule(case.rule, **case.options)
        self.memory = nn.ParameterDict(self.rule.init_params(case.heads, case.head_dim))
        self.project = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate = nn.Linear(width, case.heads * (3 * self.rule.depth + 1))

    def forward(self, x: Tensor) -> Tensor:
        """x [1, T, d] -> [1, T, d]."""
        start, size = self.rule.init_state(dict(self.memory.items()), 1), self.case.chunk_size
        (reads, last), _ = walk_spans(self._span, x, start, size, CHECKPOINT_EVERY)
        found: Tensor = self.project[3]((reads * last.unsqueeze(-1)).flatten(2))
        return found

    def _span(self, x: Tensor, state: MemoryState, replays: bool) -> tuple[tuple[Tensor, Tensor], MemoryState]:
        """Reads and the gate on them, and the state after x [1, T, d]."""
        width = self.case.head_dim
        x = rms_norm(x, x.shape[-1:])
        q, k, v = (layer(x).unflatten(-1, (-1, width)) for layer in self.project[:3])
        q, k = (unit(silu(one)) for one in (q, k))
        *gates, last = self.gate(x).sigmoid().unflatten(-1, (-1, self.case.heads)).unbind(-2)
        keep, momentum, lr = (tuple(gates[i::3]) for i in range(3))
        inputs = MemoryInputs(
            q, k, v, log_keep=tuple((0.01 * -g) for g in keep), momentum=momentum, lr=tuple(4e-4 * g for g in lr)
        )
        scan = replay_scan if replays else scan_memory
        reads, state = scan(
            self.rule, dict(self.memory.items()), inputs, state, self.case.chunk_size, checkpoint_every=CHECKPOINT_EVERY
        )
        return (reads, last), state


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
