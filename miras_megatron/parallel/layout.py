"""How a run shares its sequences: every `auto` of the section parallel decided, and one line that says why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from miras_megatron.config.context import MOST_BORDERS, fitting_carries, pieces_of, without_effect
from miras_megatron.config.schema import MEMORY_LETTERS, Run

from .choose_pieces import MOST_PIECES, Bounds, choose, most_ranks
from .simulation import LayerCosts, Schedule

PIECE_TOKENS = 1 << 16
"""Tokens of a micro-batch's slice beyond which one rank alone cuts it: what a piece's activations take is bounded."""

MEMORY_COSTS = LayerCosts.of_shares(0.25, 0.30, 0.45)
"""Shares of a layer whose scan is a memory's, where nothing was measured (context_parallel 2)."""

MAC_COSTS = LayerCosts.of_shares(0.10, 0.55, 0.35)
"""The same for memory as context, whose attention is inside its scan."""


@dataclass(frozen=True)
class ContextLayout:
    """The decided section parallel.

    carry, pieces, head_groups, forwards_ahead  as in the configuration, without any `auto`
    reason  for whoever watches the run start
    """

    carry: str
    pieces: int
    head_groups: int
    forwards_ahead: int
    reason: str

    @property
    def shares(self) -> bool:
        """Whether rows are walked in pieces, on one rank or many."""
        return self.carry != "local" or self.pieces > 1


def decide_layout(run: Run) -> ContextLayout:
    """The layout of `run`, which `check_run` has accepted. Every rank decides alike."""
    carry, why = _carry(run)
    pieces, groups, reason = _pieces_and_groups(run, carry)
    ahead = run.parallel.forwards_ahead
    forwards_ahead = 0 if ahead == "auto" else ahead
    return ContextLayout(carry, pieces, groups, forwards_ahead, f"carry {carry}: {why}; {reason}")


def layout_warnings(run: Run) -> Iterator[str]:
    """What `auto` leaves without effect; one line each. What was chosen outright `check_run` refuses."""
    if run.parallel.pieces == "auto":
        yield from without_effect(run, decide_layout(run).pieces)


def _costs(run: Run) -> LayerCosts:
    return MAC_COSTS if "c" in run.model.letters else MEMORY_COSTS


def _carry(run: Run) -> tuple[str, str]:
    asked, ranks = run.parallel.carry, run.parallel.context
    if asked != "auto":
        return asked, "as configured"
    if ranks == 1:
        return "local", "one rank has whole sequences"
    if not MEMORY_LETTERS & set(run.model.letters):
        return "relay", "only halos cross"
    if pieces_of(run) > 1 or run.parallel.head_groups not in ("auto", 1):
        return "relay", "pieces or head groups are configured"
    limit = most_ranks(_costs(run), run.model.layers // run.parallel.pipeline)
    fits = fitting_carries(run)
    if ranks <= limit or fits == ["relay"]:
        return "relay", f"{ranks} ranks; its chain keeps up to about {limit:.0f} busy"
    other = "scan" if "scan" in fits else "heads" if "heads" in fits else "relay"
    return other, f"{ranks} ranks, of which a relay keeps about {limit:.0f} busy"


def _pieces_and_groups(run: Run, carry: str) -> tuple[int, int, str]:
    parallel = run.parallel
    pieces, groups = parallel.pieces, parallel.head_groups
    if carry in ("scan", "heads"):
        return 1, 1, "whole slices"
    if pieces == "auto" and run.optimizer.shares_weights:
        return 1, 1 if groups == "auto" else groups, "one piece a rank, since ZeRO 3 gives weights away after a pass"
    if carry == "local" and pieces == "auto":
        pieces = _to_fit(run)
        each = run.data.sequence_length // pieces
        groups = 1 if groups == "auto" or pieces == 1 else groups
        return pieces, groups, "whole rows" if pieces == 1 else f"{pieces} pieces of {each} tokens"
    if pieces != "auto":
        return pieces, 1 if groups == "auto" else groups, f"{pieces} pieces a rank as configured"
    grid = run.model.segment if "c" in run.model.letters else run.memory.chunk_size
    schedule = Schedule(ranks=parallel.context, layers=run.model.layers // parallel.pipeline, replay="all_but_last")
    tokens = run.data.sequence_length // parallel.context
    if parallel.sequence:
        grid *= parallel.tensor
    bounds = Bounds(slice_tokens=tokens, grid=grid, most=min(MOST_PIECES, MOST_BORDERS // parallel.context))
    choice = choose(_costs(run), schedule, bounds)
    return choice.pieces, choice.head_groups if groups == "auto" else groups, choice.reason


def _to_fit(run: Run) -> int:
    """Pieces of one rank alone: the fewest equal ones that stay within PIECE_TOKENS, or come nearest to it."""
    tokens = run.data.sequence_length
    if set(run.model.letters) & {"a"} or run.data.packing == "ordered" or run.training.recompute:
        return 1
    least = -(-tokens * run.training.micro_batch // PIECE_TOKENS)
    grid = run.parallel.tensor if run.parallel.sequence else 1
    equal = [1, *(v for v in range(2, min(16 * least, MOST_BORDERS) + 1) if tokens % (v * grid) == 0)]
    return next((v for v in equal if v >= least), equal[-1])
