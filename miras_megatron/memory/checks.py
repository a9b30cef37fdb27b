"""What a scan refuses before it starts: every problem of its arguments at once, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from .rules import Rule, gate_of_layer
from .state import MemoryInputs, MemoryState
from .tensor_checks import GATES, count_problems, tensor_problems

OPTIONAL_GATES = ("log_keep",)


def check_scan(
    rule: Rule,
    params: Mapping[str, Tensor],
    inputs: MemoryInputs,
    state: MemoryState,
    chunk_size: int,
    checkpoint_every: int,
) -> None:
    """Raise ValueError with every problem of a scan's arguments."""
    problems = list(tensor_problems(params, vars(inputs), state)) or [
        *_size_problems(inputs, chunk_size, checkpoint_every),
        *_row_problems(inputs, state),
        *_param_problems(rule, params, inputs),
        *_state_problems(rule, inputs, state),
        *_phase_problems(inputs, state, chunk_size),
        *_gate_problems(rule, inputs),
    ]
    _refuse(rule, "scan", problems)


def check_read(rule: Rule, params: Mapping[str, Tensor], state: MemoryState, q: Tensor) -> None:
    """Raise ValueError with every problem of a read's arguments: what would broadcast reads another row's memory."""
    asked = MemoryInputs(q, q, q)  # whose q alone is looked at
    problems = list(tensor_problems(params, {"q": q}, state)) or [
        *([] if q.ndim == 4 else [f"q {tuple(q.shape)}: must be [B, T, N, D]"]),
        *_row_problems(asked, state),
        *_param_problems(rule, params, asked),
        *_state_problems(rule, asked, state),
    ]
    _refuse(rule, "read", problems)


def _refuse(rule: Rule, deed: str, problems: list[str]) -> None:
    if problems:
        raise ValueError(f"memory rule {rule.name!r} can't {deed}:\n" + "\n".join(f"  {p}" for p in problems))


def _size_problems(inputs: MemoryInputs, chunk_size: int, checkpoint_every: int) -> Iterator[str]:
    shape = tuple(inputs.q.shape)
    if len(shape) != 4 or min(shape[1:]) < 1:
        yield f"q {shape}: must be [B, T, N, D] with at least one token, head and channel"
    for name in ("k", "v"):
        if tuple(getattr(inputs, name).shape) != shape:
            yield f"{name} {tuple(getattr(inputs, name).shape)}: must have the shape of q, {shape}"
    sizes = {"chunk_size": chunk_size, "checkpoint_every": checkpoint_every}
    for name, size in sizes.items():
        if not _is_size(size):
            yield f"{name} = {size!r}: must be a whole number of at least 1"


def _is_size(size: object) -> bool:
    return type(size) is int and size >= 1


def _row_problems(inputs: MemoryInputs, state: MemoryState) -> Iterator[str]:
    """A state of other rows, heads or several dtypes."""
    if inputs.q.ndim != 4:
        return
    wanted = inputs.q.shape[0], inputs.q.shape[2]
    held = [*state.weights, *state.momentum, *state.anchor]
    for rows, heads in sorted({_rows_and_heads(x) for x in held} - {wanted}):
        yield f"state: holds {rows} rows of {heads} heads, the inputs {wanted[0]} of {wanted[1]}"
    if len(dtypes := sorted({str(x.dtype) for x in held})) > 1:
        yield f"state: its weights, momentum and anchor are {' and '.join(dtypes)}; they must be of one dtype"


def _rows_and_heads(x: Tensor) -> tuple[int, int]:
    return (x.shape[0], x.shape[1]) if x.ndim > 1 else (x.numel(), 0)


def _phase_problems(inputs: MemoryInputs, state: MemoryState, chunk_size: int) -> Iterator[str]:
    """Where the rows stand in their chunks, which decides at which weights gradients are taken."""
    if inputs.q.ndim != 4:
        return
    most = chunk_size - 1 if _is_size(chunk_size) else None
    limit = f"stands {{}} tokens inside a chunk, chunk_size = {chunk_size} is smaller"
    yield from count_problems("phase", state.phase, inputs.q.shape[0], most, limit)


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
    yield from _tail_problems(rule, inputs, state)


def _tail_problems(rule: Rule, inputs: MemoryInputs, state: MemoryState) -> Iterator[str]:
    """The past tokens of a windowed rule, and how many of them are real."""
    batch, _, heads, width = inputs.q.shape
    widths = {"key": rule.shapes(width)[0][1], "target": width, "delta": width}
    names = [] if rule.window == 1 else [name for name in widths if name != "delta" or "delta" in rule.gates]
    shapes = {name: (batch, rule.window - 1, heads, widths[name]) for name in names}
    if (held := {name: tuple(x.shape) for name, x in state.tail.items()}) != shapes:
        yield f"state: its tail is {held}, this rule has {shapes or 'none'}; make the state with this rule's init_state"
    if rule.window > 1:
        limit = f"counts {{}} past tokens, its tail holds {rule.window - 1}"
        yield from count_problems("seen", state.seen, batch, rule.window - 1, limit)
    elif state.seen is not None:
        yield "state: seen is given, this rule has no window; make the state with this rule's init_state"


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
