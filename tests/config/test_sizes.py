"""If these fail, --dry-run promises a model that fits and the job runs out of memory, or prints another's size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from miras_megatron.config.schema import Data, Memory, Model, Optimizer, Run, Training
from miras_megatron.config.sizes import memory_flops_per_token, sizes_of, state_bytes, train_flops_per_token
from miras_megatron.memory import RULES, MemoryInputs, make_rule, scan_memory
from miras_megatron.memory.fused_scalars import tile_scalars
from miras_megatron.model.build import build_model
from miras_megatron.parallel.mesh import ParallelMesh

SMALL: dict[str, Any] = {"hidden": 24, "heads": 2, "layers": 1, "window": 9, "segment": 6, "persistent_tokens": 3}

MODELS = {
    "mac": Model(block="mac", **SMALL),
    "mac-queries": Model(block="mac", memory_tokens=4, conv=0, **SMALL),
    "mag-no-persistent": Model(block="mag", **{**SMALL, "persistent_tokens": 0}),
    "lmm-writes-persistent": Model(block="lmm", write_persistent=True, **SMALL),
    "hybrid": Model(pattern="mwga", tie_embeddings=False, ffn=40, **{**SMALL, "layers": 4}),
}

MEMORIES = {
    "channel": Memory(gates="channel", gate_rank=5),
    "channel-shared": Memory(gates="channel", gates_per_layer=False, depth=3),
    "shared": Memory(gates_per_layer=False, depth=4, expansion=2),
    "constant-delta": Memory(rule="yaad", delta="constant"),
    "features": Memory(rule="omeganet", options={"degree": 2}),
    "channel-columns": Memory(rule="gated_deltanet", gates="channel", options={"gate_side": "columns"}),
}


@pytest.fixture(scope="module")
def mesh() -> Iterator[ParallelMesh]:
    one = ParallelMesh(device="cpu")
    yield one
    one.destroy()


def runs() -> dict[str, Run]:
    lmm = Model(block="lmm", **SMALL)
    data = Data(sequence_length=13)
    found = {name: Run(model=model, data=data) for name, model in MODELS.items()}
    found |= {name: Run(model=lmm, memory=memory, data=data) for name, memory in MEMORIES.items()}
    return found | {rule: Run(model=lmm, memory=Memory(rule=rule), data=data) for rule in RULES}


RUNS = runs()


@pytest.mark.parametrize("name", RUNS)
def test_parameters_and_state_are_those_of_the_model(mesh: ParallelMesh, name: str) -> None:
    """The closed forms, which need no torch, are held against what is really built."""
    run = RUNS[name]
    model = build_model(run, mesh, vocab_size=70)
    assert sizes_of(run, vocab_size=70).parameters == sum(p.numel() for p in model.parameters())
    tokens = torch.zeros(1, 13, dtype=torch.int64)
    with torch.no_grad():
        _, states = model(tokens, return_states=True)
    assert state_bytes(run) == _bytes_of(states, run)


def _bytes_of(states: Any, run: Run) -> int:
    """Of all floating-point tensors in a state, full attention's cache and the counters left out."""
    kept = {n: s for (n, s), letter in zip(sorted(states.items()), run.model.letters, strict=True) if letter != "a"}
    leaves = [x for x in pytree.tree_leaves(kept) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return sum(x.numel() * x.element_size() for x in leaves)


def test_paper_sizes() -> None:
    """Rules 12.6 say what comes out with a 32K vocabulary."""
    sizes = ((12, 768, 16, 120e6), (24, 1024, 16, 372e6), (24, 1536, 16, 814e6), (18, 2048, 8, 1.12e9))
    for layers, hidden, heads, expected in sizes:
        run = Run(model=Model(block="lmm", layers=layers, hidden=hidden, heads=heads, vocab_size=32000))
        assert sizes_of(run).parameters == pytest.approx(expected, rel=0.02)


def test_layouts_share_and_precision_costs() -> None:
    """Memory a rank falls with the ranks that share a model; bf16 keeps a float32 master beside its weights."""
    run = Run(model=Model(block="mac", hidden=256, heads=4, layers=4), training=Training(micro_batch=2))
    whole = sizes_of(run, 256)
    split = sizes_of(replace(run, parallel=replace(run.parallel, tensor=2, pipeline=2)), 256)
    bf16 = sizes_of(replace(run, training=replace(run.training, precision="bf16")), 256)
    shared = sizes_of(replace(run, optimizer=Optimizer(distributed=True)), 256, world_size=4)
    assert shared.weights_bytes * 16 == whole.weights_bytes * (16 - 8 * 3 / 4)
    assert whole.weights_bytes / 4 < split.weights_bytes < whole.weights_bytes / 2
    assert split.saved_state_bytes == whole.saved_state_bytes // 4
    assert bf16.weights_bytes * 16 == whole.weights_bytes * 18
    assert whole.rank_bytes == whole.weights_bytes + whole.saved_state_bytes + whole.logits_bytes


def test_operations_grow_as_they_should() -> None:
    """tflops and mfu in the log are this count over the clock."""
    run = Run(model=Model(block="attention", hidden=64, heads=2, layers=2, ffn=128), data=Data(sequence_length=100))
    per_layer = 8 * 64**2 + 4 * 64 * 50 + 6 * 64 * 128
    assert train_flops_per_token(run, 64) == 3 * (2 * 64 * 64 + 2 * per_layer)
    small, large = (Run(model=replace(run.model, block="lmm"), memory=Memory(chunk_size=c)) for c in (16, 64))
    assert memory_flops_per_token(small) < memory_flops_per_token(large)


def in_place_flop(total: Any, left: Any, right: Any, **_: Any) -> int:
    """Operations of baddbmm_ from the shapes; torch's counter knows only the form that is not in place."""
    return 2 * math.prod(left) * right[-1]


IN_PLACE = {torch.ops.aten.baddbmm_: in_place_flop}


def gate_operations(momentum: bool) -> int:
    """What the gates take in 512 tokens, here one set for all matrices; `memory_flops_per_token` leaves them out."""
    gate = torch.full((1, 8, 64), 0.5)
    with FlopCounterMode(display=False) as counter:
        tile_scalars(None, gate if momentum else None, gate)
    return counter.get_total_flops()


@pytest.mark.parametrize("memory", [Memory(), Memory(momentum=False), Memory(depth=3), Memory(rule="yaad")], ids=str)
def test_memory_operations_are_those_of_the_scan(memory: Memory) -> None:
    """Held against torch's own counter over the forward scan."""
    run = Run(model=Model(block="lmm", hidden=64, heads=1), memory=memory, data=Data(sequence_length=512))
    rule = make_rule(memory.rule, **memory.choices)
    params = rule.init_params(1, 64)
    q, k, v = torch.nn.functional.normalize(torch.randn(3, 1, 512, 1, 64), dim=-1)
    gates: dict[str, Any] = {name: torch.full((1, 512, 1), 1e-3) for name in rule.gates if name != "log_keep"}
    inputs = MemoryInputs(q, k, v, **gates)
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
        scan_memory(rule, params, inputs, rule.init_state(params, 1))
    counted = counter.get_total_flops() - gate_operations(rule.momentum)
    assert counted / 512 == pytest.approx(memory_flops_per_token(run), rel=0.03)
