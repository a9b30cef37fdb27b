"""Which ways of sharing a sequence fit a run, without torch: carries, pieces, head groups (context_parallel 1 to 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .choices import Choices
from .rule_table import RULE_TABLE, facts_of
from .schema import MEMORY_LETTERS, Run


def is_affine(facts: Choices, gates: str) -> bool:
    """Whether a slice maps memory states affinely, with one transition for all rows of the matrix.

    The same as `memory.rules.is_affine`, which a test holds.
    """
    plain = facts.depth == 1 and not facts.layer_norm and facts.retention == "decay" and facts.newton_schulz == "off"
    linear = facts.objective in ("dot", "l2") and facts.max_gradient_norm is None
    return plain and linear and not (gates == "channel" and facts.objective == "l2")


def _not_local(run: Run) -> str | None:
    return f"parallel.context = {run.parallel.context} ranks share a sequence" if run.parallel.context > 1 else None


def _not_relay(run: Run) -> str | None:
    return None


def _not_scan(run: Run) -> str | None:
    letters = set(run.model.letters)
    if "c" in letters:
        return "memory as context (letter c) attends inside its scan"
    if run.model.write_persistent and MEMORY_LETTERS & letters:
        return "with model.write_persistent rows are inserted into the scan"
    if MEMORY_LETTERS & letters and not is_affine(facts_of(run.memory), run.memory.gates):
        return f"memory.rule = {run.memory.rule!r} is not affine in its state"
    return None


def _not_heads(run: Run) -> str | None:
    letters, parallel = set(run.model.letters), run.parallel
    if "c" in letters:
        return "memory as context (letter c) mixes its heads inside the scan"
    if run.model.write_persistent and MEMORY_LETTERS & letters:
        return "with model.write_persistent rows are inserted into the scan"
    if run.model.heads % (parallel.tensor * parallel.context):
        return (
            f"model.heads = {run.model.heads} is not divisible by parallel.tensor x parallel.context "
            f"= {parallel.tensor * parallel.context}"
        )
    return None


CARRIES: dict[str, Callable[[Run], str | None]] = {
    "local": _not_local,
    "relay": _not_relay,
    "scan": _not_scan,
    "heads": _not_heads,
}
"""Carry -> why it does not fit a run; None: it does."""


def fitting_carries(run: Run) -> list[str]:
    """The carries that a run may take."""
    return [name for name, refuses in CARRIES.items() if refuses(run) is None]


def context_problems(run: Run) -> Iterator[str]:
    """What doesn't fit in the section parallel, as far as it concerns shared sequences; one line each."""
    parallel, letters = run.parallel, set(run.model.letters)
    if min(parallel.context, parallel.tensor, parallel.pipeline) < 1 or run.memory.rule not in RULE_TABLE:
        return
    for name in ("pieces", "head_groups", "forwards_ahead"):
        least, value = int(name != "forwards_ahead"), getattr(parallel, name)
        if value != "auto" and value < least:
            yield f"parallel.{name} = {value}: must be auto, or at least {least}"
            return
    if parallel.carry != "auto" and (reason := CARRIES[parallel.carry](run)) is not None:
        fits = ", ".join(fitting_carries(run))
        yield f"parallel.carry = {parallel.carry!r}: {reason}; what fits is {fits}"
    yield from _pieces(run)
    yield from _head_groups(run)
    if run.parallel.pieces != "auto" or run.parallel.carry in ("scan", "heads"):
        yield from without_effect(run, pieces_of(run))
    yield from _tags(run)
    shared = parallel.context > 1 or pieces_of(run) > 1
    if shared and "a" in letters:
        yield (
            f"model.pattern: full attention (letter a) needs whole sequences, but parallel.context = "
            f"{parallel.context} and parallel.pieces = {parallel.pieces}; use letter w, or set both to 1"
        )
    if shared and run.data.packing == "ordered":
        yield (
            f"data.packing = 'ordered': states are carried from step to step on one rank only; set parallel.context "
            f"= {parallel.context} and parallel.pieces = {parallel.pieces} to 1, or data.packing to reset"
        )
    if parallel.forwards_ahead not in ("auto", 0) and parallel.pipeline > 1:
        yield (
            f"parallel.forwards_ahead = {parallel.forwards_ahead}: with parallel.pipeline = {parallel.pipeline} "
            f"megatron's schedule decides; set auto or 0"
        )


def pieces_of(run: Run) -> int:
    """Pieces a rank as given; `auto` counts as 1, until `parallel.layout` has decided it."""
    return 1 if run.parallel.pieces == "auto" else run.parallel.pieces


def _pieces(run: Run) -> Iterator[str]:
    parallel, tokens, pieces = run.parallel, run.data.sequence_length, pieces_of(run)
    parts = parallel.context * pieces
    if tokens % parts:
        nearest = max(1, round(tokens / parts)) * parts
        what = f"parallel.context ({parallel.context})" + (f" x parallel.pieces ({pieces})" if pieces > 1 else "")
        yield f"data.sequence_length = {tokens}: must be a multiple of {what} = {parts}; nearest {nearest}"
    elif parallel.sequence and parallel.tensor > 1 and tokens // parts % parallel.tensor:
        yield (
            f"data.sequence_length = {tokens}: with parallel.sequence a piece of {tokens // parts} tokens must be a "
            f"multiple of parallel.tensor = {parallel.tensor}"
        )
    if pieces > 1 and parallel.carry in ("scan", "heads"):
        yield f"parallel.pieces = {pieces}: carry {parallel.carry!r} works on whole slices; set 1, or carry relay"
    if parts > 1 and run.training.recompute:
        yield (
            f"training.recompute = true: with parallel.context = {parallel.context} and parallel.pieces = {pieces} a "
            f"layer computed again would receive again; pieces are computed again anyway; set false"
        )
    if parallel.replay_every > 1 and parallel.context > 1:
        yield (
            f"parallel.replay_every = {parallel.replay_every}: with parallel.context = {parallel.context} what lies "
            f"between two pieces of a rank is on other ranks; set 1"
        )


def without_effect(run: Run, pieces: int) -> Iterator[str]:
    """Choices about pieces that nothing comes of where a rank has so many; one line each."""
    yield from _no_replay(run, pieces)
    yield from _no_relay(run, pieces)


def _no_replay(run: Run, pieces: int) -> Iterator[str]:
    """Choices about pieces that are computed again, where there is none."""
    parallel = run.parallel
    relays = parallel.context > 1 and parallel.carry in ("auto", "relay")
    if pieces > 1 or (relays and parallel.forwards_ahead not in ("auto", 0)):
        return
    reason = f"no effect where a rank has one piece, which keeps its graph (parallel.pieces = {parallel.pieces})"
    if parallel.keep_states == "host":
        yield f"parallel.keep_states = 'host': {reason}; set device, or more pieces"
    if parallel.replay_every > 1 and parallel.context == 1:
        yield f"parallel.replay_every = {parallel.replay_every}: {reason}; set 1, or more pieces"


def _no_relay(run: Run, pieces: int) -> Iterator[str]:
    """Groups of heads, where one rank walks whole rows and no relay is asked for."""
    parallel, groups = run.parallel, run.parallel.head_groups
    relays = parallel.context > 1 or pieces > 1 or parallel.carry not in ("auto", "local")
    if relays or groups in ("auto", 1) or "c" in run.model.letters:
        return
    yield (
        f"parallel.head_groups = {groups}: no effect where one rank has whole rows in one piece, which sends nothing "
        f"(parallel.context = 1, parallel.pieces = {parallel.pieces}); set 1 or auto, or more pieces"
    )


MOST_BORDERS, MOST_GROUPS, MOST_AHEAD = 1023, 48, 15
"""What a packet's tag tells apart (parallel/exchange.py)."""


def _tags(run: Run) -> Iterator[str]:
    parallel = run.parallel
    if (borders := parallel.context * pieces_of(run)) > MOST_BORDERS:
        yield f"parallel.context x parallel.pieces = {borders}: at most {MOST_BORDERS} pieces a row; set fewer"
    if parallel.head_groups != "auto" and parallel.head_groups > MOST_GROUPS:
        yield f"parallel.head_groups = {parallel.head_groups}: at most {MOST_GROUPS}; set fewer"
    if parallel.forwards_ahead != "auto" and parallel.forwards_ahead > MOST_AHEAD:
        yield f"parallel.forwards_ahead = {parallel.forwards_ahead}: at most {MOST_AHEAD}; set fewer"


def _head_groups(run: Run) -> Iterator[str]:
    parallel, groups = run.parallel, run.parallel.head_groups
    if groups == "auto" or groups == 1:
        return
    own = run.model.heads // parallel.tensor
    if "c" in run.model.letters:
        yield f"parallel.head_groups = {groups}: memory as context (letter c) mixes its heads inside the scan; set 1"
    elif groups > own:
        yield f"parallel.head_groups = {groups}: a rank has {own} heads (model.heads / parallel.tensor); set fewer"
    if parallel.carry in ("scan", "heads"):
        yield f"parallel.head_groups = {groups}: carry {parallel.carry!r} has none; set 1 or auto"
