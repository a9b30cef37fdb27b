"""What sizes and checks need to know of each named rule, without torch.

The truth is `miras_megatron.memory.RULES`; a test holds this table against it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from .schema import Memory


@dataclass(frozen=True, kw_only=True)
class RuleFacts:
    """The choices of a rule that decide shapes, gates and state. Names as in `make_rule`."""

    depth: int = 2
    expansion: int = 4
    layer_norm: bool = True
    degree: int = 1
    objective: str = "l2"
    retention: str = "decay"
    keep: bool = True
    fixed_keep: bool = False
    momentum: bool = False
    window: int = 1
    two_rates: bool = False
    newton_schulz: str = "off"
    gradient_at: str = "chunk"
    write_rate: str = "input"
    max_gradient_norm: float | None = None
    gate_side: str = "rows"

    def shapes(self, head_dim: int) -> list[tuple[int, int]]:
        """(out, in) of each matrix for heads of `head_dim` channels, the input matrix first."""
        features = head_dim if self.degree == 1 else math.comb(head_dim + self.degree, self.degree)
        widths = [features] + [self.expansion * head_dim] * (self.depth - 1) + [head_dim]
        return [(widths[i + 1], widths[i]) for i in range(self.depth)]

    @property
    def exact(self) -> bool:
        """Whether the chunk is only a tile, so that the state needs no anchor."""
        plain = self.depth == 1 and not self.layer_norm and self.retention == "decay"
        frozen = self.objective == "dot" and self.newton_schulz != "chunk" and self.max_gradient_norm is None
        return self.gradient_at != "chunk" or (plain and frozen)

    @property
    def takes_delta(self) -> bool:
        """Whether the objective has a threshold."""
        return self.objective.startswith("huber") or self.objective == "value_shift"


MATRIX = RuleFacts(depth=1, layer_norm=False)

RULE_TABLE: dict[str, RuleFacts] = {
    "titans": RuleFacts(momentum=True),
    "titans_linear": replace(MATRIX, momentum=True),
    "moneta": RuleFacts(objective="lp", retention="lq"),
    "yaad": RuleFacts(objective="huber_mixed"),
    "memora": RuleFacts(retention="kl"),
    "linear_attention": replace(MATRIX, objective="dot", keep=False, write_rate="one"),
    "retnet": replace(MATRIX, objective="dot", fixed_keep=True, write_rate="one"),
    "deltanet": replace(MATRIX, keep=False, gradient_at="previous"),
    "gated_deltanet": replace(MATRIX, gradient_at="decayed"),
    "ttt_linear": RuleFacts(depth=1, keep=False),
    "ttt_mlp": RuleFacts(keep=False),
    "dla": RuleFacts(objective="dot"),
    "swla": replace(MATRIX, objective="dot", window=2, two_rates=True),
    "omeganet": RuleFacts(layer_norm=False, window=4),
    "atlas": RuleFacts(layer_norm=False, window=4, momentum=True, newton_schulz="chunk"),
}


def facts_of(memory: Memory) -> RuleFacts:
    """The facts of the rule of a run, its changed choices applied. Raises KeyError for an unknown rule."""
    known = {f.name for f in fields(RuleFacts)}
    return replace(RULE_TABLE[memory.rule], **{k: v for k, v in memory.choices.items() if k in known})
