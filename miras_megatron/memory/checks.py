"""What a scan refuses before it starts: every problem of its arguments at once, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from .rules import Rule, gate_of_layer
from .state import MemoryInputs, MemoryState

OPTIONAL_GATES = ("log_keep",)
GATES = ("log_keep", "momentum", "lr", "delta", "lr_prev", "window")


def check_scan(
    rule: Rule,
    params: Mapping[str, Tensor],
    inputs: MemoryInputs,
    state: MemoryState,
    chunk_size: int,
    checkpoint_every: int,
) -> None:
    """Raise ValueError with every problem of a scan's arguments."""
    problems = [
        *_device_problems(params, inputs, state),
        *_size_problems(inputs, state, chunk_size, checkpoint_every),
        *_param_problems(rule, params, inputs),
        *_state_problems(rule, inputs, state),
        *_gate_problems(rule, inputs),
    ]
    if problems:
        raise ValueError(f"memory rule {rule.name!r} can't scan:\n" + "\n".join(f"  {p}" for p in problems))


def _device_problems(params: Mapping[str, Tensor], inputs: MemoryInputs, state: MemoryState) -> Iterator[str]:
    """Tensors of another device than q's: a kernel for CPUs would take their addresses for its own memory."""
    wanted = inputs.q.device
    for name, x in named_tensors(params, inputs, state):
        if x.device != wanted:
            yield f"{name} is on {x.device}: q is on {wanted}; move both to one device"


def named_tensors(
    params: Mapping[str, Tensor], inputs: MemoryInputs, state: MemoryState
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that a scan computes with, named as errors name it; the state's counts lie on the CPU anyway."""
    for name in ("q", "k", "v", *GATES):
        given = getattr(inputs, name)
        if isinstance(given, Tensor):
            yield name, given
        elif given is not None:
            yield from ((f"{name} of matrix {i}", x) for i, x in enumerate(given))
    yield from ((f"params[{name!r}]", x) for name, x in params.items())
    yield from ((f"state: {name}", x) for name, x in state.tensors().items() if name not in ("phase", "seen"))


def _size_problems(inputs: MemoryInputs, state: MemoryState, chunk_size: int, checkpoint_every: int) -> Iterator[str]:
    shape = tuple(inputs.q.shape)
    if len(shape) != 4 or shape[1] < 1:
        yield f"q {shape}: must be [B, T, N, D] with at least one token"
        return
    for name in ("k", "v"):
        if tuple(getattr(inputs, name).shape) != shape:
            yield f"{name} {tuple(getattr(inputs, name).shape)}: must have the shape of q, {shape}"
    held = [*state.weights, *state.momentum, *state.anchor]
    for rows, heads in sorted({tuple(x.shape[:2]) for x in held} - {(shape[0], shape[2])}):
        yield f"state: holds {rows} rows of {heads} heads, the inputs {shape[0]} of {shape[2]}"
    if len(dtypes := sorted({str(x.dtype) for x in held})) > 1:
        yield f"state: its weights, momentum and anchor are {' and '.join(dtypes)}; they must be of one dtype"
    sizes = {"chunk_size": chunk_size, "checkpoint_every": checkpoint_every}
    wrong = [name for name, size in sizes.items() if type(size) is not int or size < 1]
    yield from (f"{name} = {sizes[name]!r}: must be a whole number of at least 1" for name in wrong)
    if "chunk_size" in wrong:
        return
    if int(state.phase.max()) >= chunk_size:
        yield f"state: stands {int(state.phase.max())} tokens inside a chunk, chunk_size = {chunk_size} is smaller"


def _param_problems(rule: Rule, params: Mapping[str, Tensor], inputs: MemoryInputs) -> Iterator[str]:
    """Slow parameters of another rule, width or number of heads: one too many would be used as if it belonged here."""
    if inputs.q.ndim != 4:
        return
    heads, width = inputs.q.shape[2:]
    wanted = rule.param_shapes(heads, width)
    for name in [*wanted, *sorted(params.keys() - wanted.keys())]:
        if name not in wanted:
            yield f"params[{name!r}]: this rule has no such parameter; it has {', '.join(wanted)}"
        elif name not in params:
            yield f"params[{name!r}]: missing; make the params with this rule's init_params"
        elif tuple(params[name].shape) != wanted[name]:
            yield (
                f"params[{name!r}] {tuple(params[name].shape)}: must be {wanted[name]} for {heads} heads of {width}; "
                "make the params with this rule's init_params"
            )


def _state_problems(rule: Rule, inputs: MemoryInputs, state: MemoryState) -> Iterator[str]:
    """A state of another rule or head width, which would be scanned as if it were this one's."""
    if inputs.q.ndim != 4:
        return
    shapes = rule.shapes(inputs.q.shape[-1])
    wanted = {"weights": True, "momentum": rule.momentum or rule.is_ftrl, "anchor": not rule.exact}
    for name, used in wanted.items():
        held = [tuple(x.shape[2:]) for x in getattr(state, name)]
        if held != (shapes if used else []):
            yield (
                f"state: its {name} are {held}, this rule with heads of {inputs.q.shape[-1]} has "
                f"{shapes if used else 'none'}; make the state with this rule's init_state"
            )


def _gate_problems(rule: Rule, inputs: MemoryInputs) -> Iterator[str]:
    for name in GATES:
        gate = getattr(inputs, name)
        if name not in rule.gates:
            if gate is not None:
                yield f"{name}: this rule has no such gate; pass None"
        elif gate is None:
            if name not in OPTIONAL_GATES:
                yield f"{name}: this rule needs it"
        else:
            yield from _shape_problems(rule, inputs, name)


def _shape_problems(rule: Rule, inputs: MemoryInputs, name: str) -> Iterator[str]:
    tokens, full = tuple(inputs.q.shape[:3]), tuple(inputs.q.shape)
    gate = getattr(inputs, name)
    if name == "window":
        if tuple(gate.shape) != (*tokens, rule.window):
            yield f"window {tuple(gate.shape)}: must be {(*tokens, rule.window)}"
        return
    if not isinstance(gate, Tensor):
        if name not in rule.layered_gates:
            yield f"{name}: one tensor for all memory layers, not a tuple"
            return
        if len(gate) != rule.depth:
            yield f"{name}: {len(gate)} tensors for a memory of {rule.depth} matrices; one a matrix, or one for all"
            return
    for layer in range(rule.depth if name in rule.layered_gates else 1):
        one = gate_of_layer(gate, layer)
        assert one is not None
        if tuple(one.shape) not in (tokens, full):
            yield f"{name} of matrix {layer} {tuple(one.shape)}: must be {tokens} (head) or {full} (channel)"
        elif name in rule.layered_gates and one.ndim == 4 and rule.channel_side(layer) is None:
            yield (
                f"{name} of matrix {layer}: a channel gate; between the first and the last matrix only head gates "
                "act: pass a tuple with a [B, T, N] gate there"
            )
