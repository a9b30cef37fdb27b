"""The largest inner learning rate at which a memory is stable at the start of training.

With gradients anchored at a chunk's start, a chunk multiplies the weights' error by I - r G, where G
sums the curvature of its tokens: stable while r lambda < 2 (1 - m), m the momentum gate (rules 1.10).
The curvatures below are upper ends of what a test measures for unit keys that are all parallel, the
worst chunk there is; random keys have about a tenth of it. Training moves the weights, and the scale
of the last matrix with them, so this is a start and no promise.
"""

from __future__ import annotations

from .choices import Choices
from .rule_table import facts_of
from .schema import Run

LAYER_NORM_CURVATURE = {1: 0.3, 2: 2.0, 3: 6.0, 4: 10.0}
"""depth -> lambda over (chunk x 4 head width; hidden width above expansion 4): LN divides by a small spread."""
PLAIN_CURVATURE = {1: 1.0, 2: 2.0, 3: 2.0, 4: 2.0}
"""depth -> lambda over chunk, without LN."""
WIDE_INPUT_CURVATURE = 2.0
"""without LN and with init: wide_input, lambda over (chunk x head width)."""
UNIT_CURVATURE = {1: 1.6, 2: 5.0, 3: 10.0, 4: 16.0}
"""with LN and init: unit, lambda over chunk: the last matrix is larger, so the same write turns it less."""
SHARP_OBJECTIVE = 8.0
"""lp and the Huber family: tanh(10 e) is steeper than e, by measurement up to so many times."""
SIMPLEX_CURVATURE = 16.0
"""lambda over chunk for log weights that sum to fan_in (Memora)."""
ORTHOGONAL_STEP = 0.02
"""a Newton-Schulz step has spectral norm about 1 whatever the gradient: its size is the rate itself."""


def stable_lr(run: Run) -> float:
    """The bound for this run's rule, depth, head width, chunk and starting momentum."""
    facts = facts_of(run.memory)
    if facts.newton_schulz != "off":
        return ORTHOGONAL_STEP
    if facts.gradient_at != "chunk" or (facts.objective == "dot" and facts.depth == 1):
        return 1.0
    momentum = run.memory.momentum_init if facts.momentum else 0.0
    return 2.0 * (1.0 - momentum) / (_curvature(facts, run) * run.memory.chunk_size * facts.window)


def inner_lr_max(run: Run) -> float:
    """memory.lr_max, or the stability bound where it is null."""
    return run.memory.lr_max if run.memory.lr_max is not None else stable_lr(run)


def _curvature(facts: Choices, run: Run) -> float:
    """lambda over chunk."""
    if facts.retention in ("kl", "sigmoid"):
        return SIMPLEX_CURVATURE
    sharp = SHARP_OBJECTIVE if facts.objective == "lp" or facts.objective.startswith("huber") else 1.0
    if facts.layer_norm:
        if run.memory.init == "unit" or (run.memory.init == "wide_input" and facts.depth == 1):
            return sharp * UNIT_CURVATURE[facts.depth]
        return sharp * LAYER_NORM_CURVATURE[facts.depth] * max(facts.expansion, 4) * run.model.head_dim
    wide = run.memory.init == "wide_input" and facts.depth > 1
    return sharp * (WIDE_INPUT_CURVATURE * run.model.head_dim if wide else PLAIN_CURVATURE[facts.depth])
