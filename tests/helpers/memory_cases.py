"""Random but stable memory scans for any rule, run and differentiated the same way for every implementation.

A `Case` owns all leaves of one scan: inputs, params and an incoming state. `outcome` runs a scan on it and returns
everything that can be compared: reads, the state after, and the gradient of every leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from helpers.numerics import assert_close
from torch import Tensor

from miras_megatron.memory import MemoryInputs, MemoryState, Rule

Scan = Callable[..., tuple[Tensor, MemoryState]]
GATES = ("log_keep", "momentum", "lr", "delta", "lr_prev", "window")


@dataclass
class Case:
    """One scan's rule and leaves; `chunk_size` and `cu_seqlens` go to the scan as they are."""

    rule: Rule
    params: dict[str, Tensor]
    inputs: MemoryInputs
    state: MemoryState
    chunk_size: int
    cu_seqlens: Tensor | Sequence[Tensor] | None = None
    own_anchor: tuple[Tensor, ...] = ()
    """leaves behind the state's anchor, for rows inside a chunk"""

    def leaves(self) -> dict[str, Tensor]:
        """Everything a gradient may flow to, by name."""
        named = {f"params.{name}": x for name, x in self.params.items()}
        for name in ("q", "k", "v", *GATES):
            gate = getattr(self.inputs, name)
            if isinstance(gate, Tensor):
                named[name] = gate
            elif gate is not None:
                named |= {f"{name}.{i}": x for i, x in enumerate(gate)}
        named |= {f"state.{name}": x for name, x in self.state.tensors().items() if x.requires_grad and x.is_leaf}
        return named | {f"state.own_anchor.{i}": x for i, x in enumerate(self.own_anchor)}


def make_case(
    rule: Rule,
    length: int,
    chunk_size: int,
    *,
    batch: int = 2,
    heads: int = 2,
    head_dim: int = 4,
    channel: Sequence[str] = (),
    per_layer: bool = False,
    fresh: bool = False,
    phases: Sequence[int] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Case:
    """Unit keys and queries, gates inside their ranges, rates inside the stable region.

    channel    the gates that get one value per channel, where the rule lets them have it
    per_layer  a gate of its own for every memory layer
    fresh      start from the rule's own first state; otherwise from a perturbed one, its tail half full
    phases     tokens already seen of the unfinished chunk, one a row; the anchor is then a leaf of its own
    """
    random = torch.Generator().manual_seed(seed)
    params = rule.init_params(heads, head_dim, generator=random, dtype=dtype)
    params = {name: _perturbed(name, p, random).requires_grad_() for name, p in params.items()}
    shape = (batch, length, heads, head_dim)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=random, dtype=dtype)

    def unit() -> Tensor:
        return torch.nn.functional.normalize(normal(*shape), dim=-1).requires_grad_()

    # where nothing else weighs a write, values that are small are the small rate
    size = stable_rate(rule, chunk_size, head_dim) if rule.write_rate == "one" else 1.0
    inputs = MemoryInputs(unit(), unit(), (size * normal(*shape)).requires_grad_())
    for name in rule.gates:
        setattr(inputs, name, _random_gate(rule, name, shape, chunk_size, name in channel, per_layer, random, dtype))
    state = rule.init_state(params, batch)
    if not fresh:
        state = _perturbed_state(rule, state, random)
    if phases is None or rule.exact:
        return Case(rule, params, inputs, state, chunk_size)
    own = tuple(_leaf(w, random) for w in state.weights)
    state = replace(state, phase=torch.tensor(phases), anchor=_inside_only(own, state.weights, phases))
    return Case(rule, params, inputs, state, chunk_size, own_anchor=own)


def _perturbed(name: str, param: Tensor, random: torch.Generator) -> Tensor:
    """Params away from the ones and zeros they start at, so that a forgotten factor shows."""
    noise = torch.randn(param.shape, generator=random, dtype=param.dtype)
    if name == "log_keep":
        return param.clone()
    return param * (1 + 0.2 * noise.tanh()) if "weight_" in name or "scale" in name else param + 0.2 * noise


def _random_gate(
    rule: Rule,
    name: str,
    shape: tuple[int, ...],
    chunk_size: int,
    channel: bool,
    per_layer: bool,
    random: torch.Generator,
    dtype: torch.dtype,
) -> Tensor | tuple[Tensor, ...]:
    def draw(wide: bool) -> Tensor:
        size = (*shape[:3], rule.window) if name == "window" else shape if wide else shape[:3]
        uniform = torch.rand(size, generator=random, dtype=dtype)
        return _in_range(rule, name, uniform, chunk_size, shape[1], shape[-1]).requires_grad_()

    sides = [channel and rule.channel_side(layer) is not None for layer in range(rule.depth)]
    if name in ("delta", "window"):
        return draw(channel)
    if per_layer or len(set(sides)) > 1:
        return tuple(draw(side) for side in sides)
    return draw(sides[0])


def _in_range(rule: Rule, name: str, uniform: Tensor, chunk_size: int, length: int, head_dim: int) -> Tensor:
    """A uniform draw mapped into a gate's range."""
    if name == "log_keep":
        # Under a layer norm weights that fade make the inner loss steeper without end, and orthogonal writes turn them
        # ever more: a share of the first weights is kept, whatever the length.
        lasting = rule.layer_norm or rule.newton_schulz != "off"
        return -0.3 * uniform * (min(1.0, 10.0 / length) if lasting else 1.0)
    if name == "delta":
        return 0.2 + 2.0 * uniform
    if name in ("lr", "lr_prev"):
        return (0.3 + 0.7 * uniform) * stable_rate(rule, chunk_size, head_dim)
    return uniform


def stable_rate(rule: Rule, chunk_size: int, head_dim: int) -> float:
    """A rate well inside the stable region, for momentum up to 1 and keys that all point one way (rules 1.10).

    Outside it the recurrence is chaotic: over 100 tokens it grew the last bit of a float64 to the whole read. With a
    layer norm one token's curvature is already that of many, so a chunk below 16 counts as 16.
    """
    if rule.newton_schulz != "off":
        return 0.1 * min(1.0, chunk_size / 64)
    hidden = head_dim * (rule.expansion if rule.depth > 1 else 1)
    sharp = 8.0 if rule.objective == "huber_mixed" else 1.0
    curvature = sharp * (hidden if rule.layer_norm else 2.0) * max(1, rule.depth - 1) * rule.window
    tokens = max(chunk_size, 16) if rule.layer_norm else chunk_size
    return 1.0 / (curvature * (1 if rule.exact else tokens))


def _perturbed_state(rule: Rule, state: MemoryState, random: torch.Generator) -> MemoryState:
    """Leaves near the rule's first state: other weights, running momentum, a tail with unequal counts of real rows."""

    def small(x: Tensor) -> Tensor:
        return (0.05 * torch.randn(x.shape, generator=random, dtype=x.dtype)).requires_grad_()

    weights = tuple(_leaf(w, random) for w in state.weights)
    momentum = tuple(_leaf(w, random) if float(w.detach().abs().max()) > 0 else small(w) for w in state.momentum)
    anchor = weights if state.anchor else ()
    if state.seen is None:
        return replace(state, weights=weights, momentum=momentum, anchor=anchor)
    seen = (torch.arange(len(state.seen)) + 1).clamp_max(rule.window - 1)
    real = torch.arange(rule.window - 1) >= rule.window - 1 - seen[:, None]
    tail = {name: _real_rows(name, x, real, random) for name, x in state.tail.items()}
    return replace(state, weights=weights, momentum=momentum, anchor=anchor, tail=tail, seen=seen)


def _leaf(x: Tensor, random: torch.Generator) -> Tensor:
    """A leaf near `x`, of the same signs."""
    noise = torch.randn(x.shape, generator=random, dtype=x.dtype)
    return (x.detach() * (1 + 0.1 * noise.tanh())).requires_grad_()


def _inside_only(own: tuple[Tensor, ...], weights: tuple[Tensor, ...], phases: Sequence[int]) -> tuple[Tensor, ...]:
    """Anchors apart from the weights for rows inside a chunk; at a chunk border the two are one."""
    inside = torch.tensor(phases)[:, None, None, None] > 0
    return tuple(torch.where(inside, a, w) for a, w in zip(own, weights, strict=True))


def _real_rows(name: str, x: Tensor, real: Tensor, random: torch.Generator) -> Tensor:
    rows = torch.randn(x.shape, generator=random, dtype=x.dtype)
    rows = rows.abs() if name == "delta" else rows / x.shape[-1] ** 0.5
    return (rows * real[..., None, None]).requires_grad_()


def outcome(scan: Scan, case: Case, **options: object) -> dict[str, Tensor]:
    """reads, the state after, and the gradient of every leaf under one fixed random loss on all of them."""
    reads, state = scan(
        case.rule, case.params, case.inputs, case.state, case.chunk_size, cu_seqlens=case.cu_seqlens, **options
    )
    results = {"reads": reads} | {f"end.{name}": x for name, x in state.tensors().items()}
    return {name: x.detach() for name, x in results.items()} | gradients(results, case.leaves())


def gradients(results: dict[str, Tensor], leaves: dict[str, Tensor], seed: int = 1) -> dict[str, Tensor]:
    """grad.<leaf> of a random linear loss on every differentiable result; zeros where nothing flows."""
    random = torch.Generator().manual_seed(seed)
    loss = torch.zeros((), dtype=torch.float64)
    for name in sorted(results):
        weight = torch.randn(results[name].shape, generator=random, dtype=torch.float64)
        if results[name].requires_grad:
            loss = loss + (weight * results[name]).sum()
    # Retained: a case's start state may hang on its params by a graph that every implementation shares.
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, retain_graph=True)
    return {
        f"grad.{n}": torch.zeros_like(x) if g is None else g for (n, x), g in zip(leaves.items(), grads, strict=True)
    }


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], rtol: float = 1e-9, floor: float = 1e-4) -> None:
    """Every named tensor of two outcomes is equal."""
    assert got.keys() == want.keys(), f"{sorted(got.keys() ^ want.keys())} are in one outcome only"
    for name in want:
        assert_close(name, got[name], want[name], rtol, floor)
