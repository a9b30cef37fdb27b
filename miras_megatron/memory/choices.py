"""The choices of a memory rule as plain data: what each may be, which go together, and which have an effect.

Free of torch on purpose, and it imports nothing of ours: `config/choices.py` is this very file once more (a test holds
the two equal byte for byte), so that a configuration is checked where there is no torch. What the choices compute is
said in `rules.py`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

CHOICES: dict[str, tuple[str, ...]] = {
    "objective": ("dot", "l2", "lp", "huber_coordinate", "huber_norm", "huber_mixed", "value_shift"),
    "retention": ("decay", "lq", "kl", "elastic_net", "sigmoid"),
    "gradient_at": ("chunk", "previous", "decayed"),
    "write_rate": ("input", "one"),
    "link": ("printed", "exact_link", "unit_norm"),
    "link_read": ("chunk", "token"),
    "kl_form": ("linear", "exact"),
    "elastic_form": ("local", "ftrl"),
    "soft": ("hard", "smooth"),
    "newton_schulz": ("off", "chunk", "token"),
    "gate_side": ("rows", "columns"),
    "init": ("fan_in", "wide_input", "unit", "zeros"),
}


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What one memory computes. Every field but `name` is a keyword of `make_rule`."""

    name: str
    # -- structure: f(z) = [z +] [LN] (W_out gelu( ... W_in phi(z)))
    depth: int = 2
    """matrices of the memory, 1 to 4; 1 is a plain W z"""
    expansion: int = 4
    """hidden width over head width, depth >= 2"""
    residual: bool = True
    """adds z to the read (and so to the prediction)"""
    layer_norm: bool = True
    """affine LN over the last matrix's output, eps 1e-5; its weight and bias are slow parameters"""
    degree: int = 1
    """degree of the polynomial features of keys and queries; 1 is off"""
    # -- objective (attentional bias): e = f(k) - v
    objective: str = "l2"
    p: float = 3.0
    """exponent of `lp`, >= 1; 2 is l2"""
    sharpness: float = 10.0
    """nu of sgn(x) ~ tanh(nu x) in `lp` and `huber_mixed`"""
    # -- retention
    retention: str = "decay"
    keep: bool = True
    """takes a keep gate; without one everything is kept"""
    fixed_keep: bool = False
    """retnet: the keep gate of head h is the constant 1 - 2^(-5-h), a fixed parameter"""
    q: float = 4.0
    """exponent of `lq`"""
    link: str = "printed"
    """`lq`: printed A/||A||_q^(q-2); exact_link sign(A)|A|^(p-1)/||A||_p^(p-2), p = q/(q-1); unit_norm A/||A||_q"""
    link_read: str = "chunk"
    """`lq`: reads inside a chunk use the norm frozen at its start (chunk) or the running one (token)"""
    kl_form: str = "linear"
    """`kl`: published lag-token form (linear) or log-space per token (exact)"""
    elastic_form: str = "local"
    c1: float = 10.0
    """`elastic_net`: ||W||_1 / c1"""
    c2: float = 10.0
    """`elastic_net`, local form: ||W||^2 / (2 c2)"""
    soft: str = "hard"
    """`elastic_net`: soft threshold, hard-edged or the smooth |x| arctan(x/gam) / (pi/2)"""
    # -- learner
    momentum: bool = False
    window: int = 1
    """c of the Omega rule: gradients of the last c tokens at the current anchor, weighted by `inputs.window`"""
    two_rates: bool = False
    """swla: rates (lr_prev, lr) for the previous and this token instead of window weights; window = 2"""
    newton_schulz: str = "off"
    """atlas: write r NS5(S) at the chunk's last token (chunk) or at every token (token)"""
    gradient_at: str = "chunk"
    """where u_t is taken: the chunk's first weights, or exactly at W_{t-1} (delta net) or a_t W_{t-1} (gated)"""
    write_rate: str = "input"
    """lr from the inputs, or the constant one"""
    max_gradient_norm: float | None = None
    """clamp: each token's anchored gradient of each matrix is scaled to at most this Frobenius norm (per token,
    since a norm over the chunk would let reads see later tokens)"""
    # -- gates and start
    gate_side: str = "rows"
    """where channel gates of a single matrix act: rows (value side) or columns (key side)"""
    init: str = "fan_in"
    """std of W_0: fan_in 1/sqrt(fan_in); wide_input the same with 1 in the input matrix; unit 1; zeros 0"""

    # -- derived -----------------------------------------------------------------------------------
    @property
    def exact(self) -> bool:
        """Whether the chunk is only a tile: the function does not hang on chunk_size."""
        plain = self.depth == 1 and not self.layer_norm and self.retention == "decay"
        frozen = self.objective == "dot" and self.newton_schulz != "chunk" and self.max_gradient_norm is None
        return self.gradient_at != "chunk" or (plain and frozen)

    @property
    def is_ftrl(self) -> bool:
        """Elastic net in its FTRL form: the state keeps A (in the momentum's place) beside W = soft(A)."""
        return self.retention == "elastic_net" and self.elastic_form == "ftrl"

    @property
    def gates(self) -> tuple[str, ...]:
        """Names of the gates of `MemoryInputs` this rule reads; all are required but log_keep."""
        takes = {
            "log_keep": self.keep and not self.fixed_keep,
            "momentum": self.momentum,
            "lr": self.write_rate == "input",
            "delta": self.objective.startswith("huber") or self.objective == "value_shift",
            "lr_prev": self.two_rates,
            "window": self.window > 1 and not self.two_rates,
        }
        return tuple(name for name, used in takes.items() if used)

    @property
    def takes_delta(self) -> bool:
        """Whether the objective has a threshold."""
        return "delta" in self.gates

    @property
    def layered_gates(self) -> tuple[str, ...]:
        """The gates that may differ from memory layer to memory layer."""
        return tuple(name for name in self.gates if name in ("log_keep", "momentum", "lr", "lr_prev"))

    @property
    def fixed_params(self) -> tuple[str, ...]:
        """Names in `init_params` that are constants, not to be trained."""
        return ("log_keep",) if self.fixed_keep else ()

    def channel_side(self, layer: int) -> str | None:
        """Where a channel gate acts on matrix `layer`: rows, columns, or None where no side has the head's width."""
        side = self.gate_side if self.depth == 1 else {0: "columns", self.depth - 1: "rows"}.get(layer)
        return None if side == "columns" and self.degree > 1 else side

    def feature_dim(self, head_dim: int) -> int:
        """Width of phi(k): head_dim, or binom(head_dim + degree, degree) with polynomial features."""
        return head_dim if self.degree == 1 else math.comb(head_dim + self.degree, self.degree)

    def shapes(self, head_dim: int) -> list[tuple[int, int]]:
        """(out, in) of each matrix, the input matrix first."""
        hidden = self.expansion * head_dim
        widths = [self.feature_dim(head_dim)] + [hidden] * (self.depth - 1) + [head_dim]
        return [(widths[i + 1], widths[i]) for i in range(self.depth)]


def _matrix(**choices: Any) -> dict[str, Any]:
    """A plain matrix memory W z, started from zero."""
    return {"depth": 1, "residual": False, "layer_norm": False, "init": "zeros"} | choices


PRESETS: dict[str, dict[str, Any]] = {
    # Titans 3.1: MLP memory, l2, decay and momentum; and its linear case
    "titans": {"momentum": True},
    "titans_linear": _matrix(momentum=True, init="fan_in"),
    # Miras 5: the three models
    "moneta": {"objective": "lp", "p": 3.0, "retention": "lq", "q": 4.0},
    "yaad": {"objective": "huber_mixed"},
    "memora": {"retention": "kl"},
    # Miras, table 1: known models in the frame
    "linear_attention": _matrix(objective="dot", keep=False, write_rate="one"),
    "retnet": _matrix(objective="dot", fixed_keep=True, write_rate="one"),
    "deltanet": _matrix(keep=False, gradient_at="previous"),
    "gated_deltanet": _matrix(gradient_at="decayed"),
    "ttt_linear": {"depth": 1, "keep": False},
    "ttt_mlp": {"keep": False},
    # Memory Caching 3.4: bases
    "dla": {"objective": "dot"},
    "swla": _matrix(objective="dot", window=2, two_rates=True),
    # ATLAS: the Omega rule, and with orthogonalised momentum
    "omeganet": {"layer_norm": False, "window": 4},
    "atlas": {"layer_norm": False, "window": 4, "momentum": True, "newton_schulz": "chunk"},
}
"""Named rule -> its choices away from the defaults."""


@dataclass(frozen=True)
class Problem:
    """What is wrong with one choice; `str` is the line that is told."""

    field: str
    text: str
    """what follows the field's name"""

    def __str__(self) -> str:
        return self.field + self.text


def find_choice_problems(name: str, given: Mapping[str, Any]) -> list[Problem]:
    """Everything wrong with the named rule under the `given` choices, which are those a user wrote down.

    A given choice without effect in the combination is refused even where its value is the default: whoever writes it
    believes that it does something. Choices not given are never refused for that. Where a value itself is none, the
    combinations are not judged.
    """
    known = {f.name for f in fields(Choices)} - {"name"}
    bad = [Problem(k, f": unknown choice{_nearest(k, known)}") for k in sorted(map(str, set(given) - known))]
    choices = replace(Choices(name=name, **PRESETS[name]), **{k: v for k, v in given.items() if k in known})
    values = value_problems(choices)
    return bad + (values or combination_problems(choices) + effect_problems(choices, given))


def _nearest(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; the choices are {', '.join(sorted(known))}"


# -- values by themselves ----------------------------------------------------------------------------------

KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "float | None": ((int, float, type(None)), "a number or null"),
    "str": ((str,), "text"),
}
"""Annotation of a choice -> what it may be, and that in words; choices come from YAML files too."""

RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "depth": (lambda x: x in (1, 2, 3, 4), "a memory has 1 to 4 matrices"),
    "expansion": (lambda x: x >= 1, "must be at least 1"),
    "degree": (lambda x: x >= 1, "must be at least 1 (1 is off)"),
    "window": (lambda x: x >= 1, "must be at least 1 (1 is off)"),
    "p": (lambda x: 1 <= x < math.inf, "must be a finite number of at least 1"),
    "q": (lambda x: 1 < x < math.inf, "must be a finite number above 1"),
    "c1": (lambda x: x > 0, "must be above 0; .inf takes the term out"),
    "c2": (lambda x: 0 < x < math.inf, "must be a finite number above 0"),
    "sharpness": (lambda x: 0 < x < math.inf, "must be a finite number above 0"),
    "max_gradient_norm": (lambda x: x is None or 0 < x < math.inf, "must be finite and above 0, or null for none"),
}


def value_problems(choices: Choices) -> list[Problem]:
    """Values of another type, unknown words, numbers out of range; written so that NaN is in no range."""
    bad = []
    for f in fields(Choices):
        value, (kinds, words) = getattr(choices, f.name), KINDS[str(f.type)]
        holds, rule = RANGES.get(f.name, (lambda _: True, ""))
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            bad.append(Problem(f.name, f" = {value!r}: must be {words}"))
        elif f.name in CHOICES and value not in CHOICES[f.name]:
            bad.append(Problem(f.name, f" = {value!r}: must be one of {', '.join(CHOICES[f.name])}"))
        elif not holds(value):
            bad.append(Problem(f.name, f" = {value!r}: {rule}"))
    return bad


# -- what goes together ------------------------------------------------------------------------------------


def combination_problems(c: Choices) -> list[Problem]:
    """Choices that exclude each other: the fields and the way out."""
    bad: list[Problem] = []

    def refuse(condition: bool, field: str, others: str, text: str) -> None:
        if condition:
            named = " and ".join(f"{other} = {getattr(c, other)!r}" for other in others.split())
            bad.append(Problem(field, f" = {getattr(c, field)!r} with {named}: {text}"))

    gateless = c.retention in ("elastic_net", "sigmoid")
    refuse(c.keep and gateless, "keep", "retention", "that retention has no keep gate; set keep=False")
    refuse(c.fixed_keep and not c.keep, "fixed_keep", "keep", "set keep=True")
    refuse(c.fixed_keep and c.retention != "decay", "fixed_keep", "retention", "only with retention='decay'")
    refuse(
        c.momentum and c.retention != "decay",
        "momentum",
        "retention",
        "momentum only goes with retention='decay'; set momentum=False",
    )
    orthogonal = c.newton_schulz != "off"
    refuse(
        orthogonal and not c.momentum,
        "newton_schulz",
        "momentum",
        "it acts on the momentum; set momentum=True or 'off'",
    )
    refuse(
        c.two_rates and c.window != 2, "two_rates", "window", "the two rates are those of a window of 2; set window=2"
    )
    refuse(
        c.two_rates and c.write_rate != "input",
        "two_rates",
        "write_rate",
        "the rates come from the inputs; set write_rate='input'",
    )
    refuse(
        c.two_rates and orthogonal,
        "two_rates",
        "newton_schulz",
        "the rate acts outside the orthogonal momentum, so there is no place for a second one; use window weights "
        "(two_rates=False) or newton_schulz='off'",
    )
    refuse(
        c.retention == "lq" and c.init == "zeros",
        "init",
        "retention",
        "the link divides by the norm of A_0; use init='fan_in'",
    )
    for field, value in (EXACT_GRADIENTS if c.gradient_at != "chunk" else {}).items():
        refuse(
            getattr(c, field) != value,
            "gradient_at",
            field,
            f"exact gradients inside a chunk need {field}={value!r}; or use gradient_at='chunk'",
        )
    return bad


EXACT_GRADIENTS: dict[str, Any] = {
    "depth": 1,
    "layer_norm": False,
    "objective": "l2",
    "retention": "decay",
    "momentum": False,
    "window": 1,
    "max_gradient_norm": None,
}
"""What gradients at the running weights need."""


# -- what has an effect ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Effect:
    """When a choice has one, and for the message: the choices that decide it, what it is, the way out."""

    when: Callable[[Choices], bool]
    hangs_on: str = ""
    what: str = ""
    way: str = ""


ALWAYS = Effect(lambda c: True)


def _part_of(field: str, value: str, what: str) -> Effect:
    """The choice belongs to one value of another."""
    return Effect(lambda c: getattr(c, field) == value, field, f"{what} of {field} {value!r}", f"{field}={value!r}")


EFFECTS: dict[str, Effect] = {
    "depth": ALWAYS,
    "expansion": Effect(lambda c: c.depth > 1, "depth", "the width between two matrices", "depth=2"),
    "residual": ALWAYS,
    "layer_norm": ALWAYS,
    "degree": ALWAYS,
    "objective": ALWAYS,
    "p": _part_of("objective", "lp", "the exponent"),
    "sharpness": Effect(
        lambda c: c.objective == "huber_mixed" or (c.objective == "lp" and c.p != 2),
        "objective p",
        "the steepness of the smoothed sign in objectives 'huber_mixed' and 'lp', the latter with p other than 2",
        "one of these",
    ),
    "retention": ALWAYS,
    "keep": ALWAYS,
    "fixed_keep": ALWAYS,
    "q": _part_of("retention", "lq", "the exponent"),
    "link": _part_of("retention", "lq", "the map A -> W"),
    "link_read": Effect(
        lambda c: c.retention == "lq" and (c.q != 2 or c.link == "unit_norm"),
        "retention q link",
        "which norm divides a read of retention 'lq'; with q = 2 only link 'unit_norm' has one",
        "these",
    ),
    "kl_form": _part_of("retention", "kl", "the form"),
    "elastic_form": _part_of("retention", "elastic_net", "the form"),
    "c1": _part_of("retention", "elastic_net", "a weight"),
    "c2": Effect(
        lambda c: c.retention == "elastic_net" and c.elastic_form == "local",
        "retention elastic_form",
        "a weight of retention 'elastic_net' in its local form",
        "retention='elastic_net', elastic_form='local'",
    ),
    "soft": Effect(
        lambda c: c.retention == "elastic_net" and c.c1 < math.inf,
        "retention c1",
        "the shape of the threshold of retention 'elastic_net', which is 0 where c1 is infinite",
        "retention='elastic_net' with a finite c1",
    ),
    "momentum": ALWAYS,
    "window": ALWAYS,
    "two_rates": ALWAYS,
    "newton_schulz": ALWAYS,
    "gradient_at": ALWAYS,
    "write_rate": ALWAYS,
    "max_gradient_norm": ALWAYS,
    "gate_side": Effect(
        lambda c: c.depth == 1 and bool(c.layered_gates) and (c.degree == 1 or c.gate_side == "rows"),
        "depth degree layered_gates",
        "where channel gates of a single matrix act, on columns only with degree = 1",
        "depth=1 and degree=1 in a rule with gates",
    ),
    "init": Effect(
        lambda c: c.retention not in ("kl", "sigmoid") or c.init in ("unit", "zeros"),
        "retention",
        "the spread of the start, which is 1 for logits whatever the fan-in",
        "init='unit' or 'zeros'",
    ),
}
"""One entry a choice: when it has an effect. A switch that a combination may ask to be off is ALWAYS one: what it
can't be is said by `combination_problems`."""


def effect_problems(choices: Choices, given: Mapping[str, Any]) -> list[Problem]:
    """Given choices that change nothing in this combination."""
    bad = []
    for name, value in given.items():
        effect = EFFECTS.get(name, ALWAYS)
        if not effect.when(choices):
            others = ", ".join(f"{other} = {getattr(choices, other)!r}" for other in effect.hangs_on.split())
            text = f" = {value!r}: no effect with {others}; it is {effect.what}; leave it out, or set {effect.way}"
            bad.append(Problem(name, text))
    return bad
