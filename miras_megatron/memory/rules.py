"""A memory rule = structure x objective x retention x learner (the frame of Miras), and the registry of named rules.

A `Rule` is plain data: it says what is computed, `oracle` and `chunked` compute it. Wrong
combinations are refused here, all at once, each with the field, the value and the way out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from .state import Gate, MemoryState

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
class Rule:
    """What one memory computes. Every field is a keyword of `make_rule`."""

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

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise ValueError(f"rule {self.name!r} can't be built:\n" + "\n".join(f"  {p}" for p in problems))

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

    # -- parameters and state ----------------------------------------------------------------------
    def init_params(
        self,
        heads: int,
        head_dim: int,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> dict[str, Tensor]:
        """The slow parameters, leading dim `heads` each.

        weight_i     [heads, out, in]  learned start of matrix i (input matrix 0): W_0; A_0 for `lq` and FTRL;
                                       logits for `kl` (W_0 = scale softmax) and `sigmoid`
        scale_i      [heads]           c of `kl`, starts at fan_in
        norm_weight, norm_bias         [heads, head_dim], where layer_norm
        coefficients [heads, degree+1] Taylor coefficients of the features, start 1/i!, where degree > 1
        log_keep     [heads]           retnet's constant
        """
        params: dict[str, Tensor] = {}
        for i, (out, fan_in) in enumerate(self.shapes(head_dim)):
            noise = torch.randn(heads, out, fan_in, generator=generator, dtype=dtype, device=device)
            params[f"weight_{i}"] = noise * self._init_std(i, fan_in)
            if self.retention == "kl":
                params[f"scale_{i}"] = torch.full((heads,), float(fan_in), dtype=dtype, device=device)
        if self.layer_norm:
            params["norm_weight"] = torch.ones(heads, head_dim, dtype=dtype, device=device)
            params["norm_bias"] = torch.zeros(heads, head_dim, dtype=dtype, device=device)
        if self.degree > 1:
            taylor = [1.0 / math.factorial(i) for i in range(self.degree + 1)]
            params["coefficients"] = torch.tensor(taylor, dtype=dtype, device=device).expand(heads, -1).clone()
        if self.fixed_keep:
            h = torch.arange(heads, dtype=dtype, device=device)
            params["log_keep"] = torch.log1p(-torch.exp2(-5.0 - h))
        return params

    def _init_std(self, layer: int, fan_in: int) -> float:
        if self.init == "zeros":
            return 0.0
        if self.init == "unit" or self.retention in ("kl", "sigmoid") or (self.init == "wide_input" and layer == 0):
            return 1.0
        return fan_in**-0.5

    def start_weights(self, params: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """The stored variable before the first token, per matrix [heads, out, in], differentiable in params."""
        weights = []
        for i in range(self.depth):
            weight = params[f"weight_{i}"]
            if self.retention == "kl":
                log_weight = torch.log_softmax(weight, -1) + params[f"scale_{i}"].log()[:, None, None]
                weight = log_weight if self.kl_form == "exact" else log_weight.exp()
            weights.append(weight)
        return tuple(weights)

    def init_state(self, params: dict[str, Tensor], batch: int) -> MemoryState:
        """The state before the first token, for `batch` rows; at least float32; gradients flow to params."""
        weights = tuple(_at_least_float32(w).expand(batch, *w.shape) for w in self.start_weights(params))
        momentum: tuple[Tensor, ...] = tuple(torch.zeros_like(w) for w in weights) if self.momentum else ()
        if self.is_ftrl:
            momentum = weights
        phase = torch.zeros(batch, dtype=torch.int64)
        tail, seen = self._empty_tail(weights[0], params, batch)
        return MemoryState(weights, momentum, () if self.exact else weights, phase, tail, seen)

    def _empty_tail(
        self, like: Tensor, params: dict[str, Tensor], batch: int
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        if self.window == 1:
            return {}, None
        heads, head_dim = like.shape[1], params[f"weight_{self.depth - 1}"].shape[-2]
        widths = {"key": like.shape[-1], "target": head_dim} | ({"delta": head_dim} if "delta" in self.gates else {})
        tail = {name: like.new_zeros(batch, self.window - 1, heads, width) for name, width in widths.items()}
        return tail, torch.zeros(batch, dtype=torch.int64)


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _problems(rule: Rule) -> list[str]:
    """What is wrong with a combination: one line each, naming the fields and the way out."""
    bad = _type_problems(rule) or [
        f"{name} = {getattr(rule, name)!r}: must be one of {', '.join(allowed)}"
        for name, allowed in CHOICES.items()
        if getattr(rule, name) not in allowed
    ]
    if bad:
        return bad

    def refuse(condition: bool, text: str) -> None:
        if condition:
            bad.append(text)

    refuse(rule.depth not in (1, 2, 3, 4), f"depth = {rule.depth}: a memory has 1 to 4 matrices")
    refuse(rule.expansion < 1, f"expansion = {rule.expansion}: must be at least 1")
    refuse(rule.degree < 1, f"degree = {rule.degree}: must be at least 1 (1 is off)")
    refuse(rule.window < 1, f"window = {rule.window}: must be at least 1 (1 is off)")
    refuse(rule.p < 1, f"p = {rule.p}: must be at least 1")
    refuse(rule.q <= 1, f"q = {rule.q}: must be above 1")
    refuse(rule.c1 <= 0 or rule.c2 <= 0, f"c1 = {rule.c1}, c2 = {rule.c2}: must be above 0")
    refuse(rule.sharpness <= 0, f"sharpness = {rule.sharpness}: must be above 0")
    clamp = rule.max_gradient_norm
    refuse(clamp is not None and clamp <= 0, f"max_gradient_norm = {clamp}: must be above 0, or null for none")
    refuse(
        rule.keep and rule.retention in ("elastic_net", "sigmoid"),
        f"keep = True with retention = {rule.retention!r}: that retention has no keep gate; set keep=False",
    )
    refuse(rule.fixed_keep and not rule.keep, "fixed_keep = True with keep = False: set keep=True")
    refuse(
        rule.fixed_keep and rule.retention != "decay",
        f"fixed_keep = True with retention = {rule.retention!r}: only with retention='decay'",
    )
    refuse(
        rule.momentum and rule.retention != "decay",
        f"momentum = True with retention = {rule.retention!r}: momentum only goes with retention='decay'",
    )
    refuse(
        rule.newton_schulz != "off" and not rule.momentum,
        f"newton_schulz = {rule.newton_schulz!r} with momentum = False: it acts on the momentum; set momentum=True",
    )
    refuse(
        rule.two_rates and rule.window != 2,
        f"two_rates = True with window = {rule.window}: the two rates are those of a window of 2; set window=2",
    )
    refuse(
        rule.two_rates and rule.write_rate != "input",
        "two_rates = True with write_rate = 'one': the rates come from the inputs; set write_rate='input'",
    )
    refuse(
        rule.two_rates and rule.newton_schulz != "off",
        f"two_rates = True with newton_schulz = {rule.newton_schulz!r}: the rate acts outside the orthogonal momentum, "
        "so there is no place for a second one; use window weights (two_rates=False) or newton_schulz='off'",
    )
    refuse(
        rule.retention == "lq" and rule.init == "zeros",
        "retention = 'lq' with init = 'zeros': the link divides by the norm of A_0; use init='fan_in'",
    )
    if rule.gradient_at != "chunk":
        bad += _exact_gradient_problems(rule)
    return bad


KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "float | None": ((int, float, type(None)), "a number or null"),
    "str": ((str,), "text"),
}
"""Annotation of a choice -> what it may be, and that in words; choices come from YAML files too."""


def _type_problems(rule: Rule) -> list[str]:
    bad = []
    for f in fields(rule):
        value, (kinds, words) = getattr(rule, f.name), KINDS[str(f.type)]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            bad.append(f"{f.name} = {value!r}: must be {words}")
    return bad


def _exact_gradient_problems(rule: Rule) -> list[str]:
    wanted: dict[str, Any] = {
        "depth": 1,
        "layer_norm": False,
        "objective": "l2",
        "retention": "decay",
        "momentum": False,
        "window": 1,
        "max_gradient_norm": None,
    }
    return [
        f"gradient_at = {rule.gradient_at!r} with {name} = {getattr(rule, name)!r}: "
        f"exact gradients inside a chunk need {name}={value!r}; or use gradient_at='chunk'"
        for name, value in wanted.items()
        if getattr(rule, name) != value
    ]


def _matrix(name: str, **choices: Any) -> Rule:
    """A plain matrix memory W z, started from zero."""
    plain: dict[str, Any] = {"depth": 1, "residual": False, "layer_norm": False, "init": "zeros"}
    return Rule(name=name, **plain | choices)


RULES: dict[str, Rule] = {
    # Titans 3.1: MLP memory, l2, decay and momentum; and its linear case
    "titans": Rule(name="titans", momentum=True),
    "titans_linear": _matrix("titans_linear", momentum=True, init="fan_in"),
    # Miras 5: the three models
    "moneta": Rule(name="moneta", objective="lp", p=3.0, retention="lq", q=4.0),
    "yaad": Rule(name="yaad", objective="huber_mixed"),
    "memora": Rule(name="memora", retention="kl"),
    # Miras, table 1: known models in the frame
    "linear_attention": _matrix("linear_attention", objective="dot", keep=False, write_rate="one"),
    "retnet": _matrix("retnet", objective="dot", fixed_keep=True, write_rate="one"),
    "deltanet": _matrix("deltanet", keep=False, gradient_at="previous"),
    "gated_deltanet": _matrix("gated_deltanet", gradient_at="decayed"),
    "ttt_linear": Rule(name="ttt_linear", depth=1, keep=False),
    "ttt_mlp": Rule(name="ttt_mlp", keep=False),
    # Memory Caching 3.4: bases
    "dla": Rule(name="dla", objective="dot"),
    "swla": _matrix("swla", objective="dot", window=2, two_rates=True),
    # ATLAS: the Omega rule, and with orthogonalised momentum
    "omeganet": Rule(name="omeganet", layer_norm=False, window=4),
    "atlas": Rule(name="atlas", layer_norm=False, window=4, momentum=True, newton_schulz="chunk"),
}


def make_rule(name: str, **choices: Any) -> Rule:
    """The named rule with some of its choices changed: `make_rule("titans", depth=3, momentum=False)`.

    Raises ValueError that names an unknown rule or choice, or every wrong combination.
    """
    if name not in RULES:
        raise ValueError(f"rule = {name!r}: unknown; the named rules are {', '.join(RULES)}")
    known = {f.name for f in fields(Rule)} - {"name"}
    unknown = sorted(set(choices) - known)
    if unknown:
        raise ValueError(
            f"rule {name!r}: unknown choice {', '.join(unknown)}; the choices are {', '.join(sorted(known))}"
        )
    return replace(RULES[name], **choices)


def gate_of_layer(gate: Gate, layer: int) -> Tensor | None:
    """The gate of memory layer `layer`: its own from a tuple, or the shared one."""
    if gate is None or isinstance(gate, Tensor):
        return gate
    return gate[layer]


def is_affine(rule: Rule, channel_rows: bool = False) -> bool:
    """Whether a slice maps state to state affinely with one transition for all rows (context_parallel `scan`).

    `channel_rows`: some gate acts per row of the matrix, which makes one transition per row.
    """
    plain = rule.depth == 1 and not rule.layer_norm and rule.retention == "decay" and rule.newton_schulz == "off"
    linear = rule.objective in ("dot", "l2") and rule.max_gradient_norm is None
    return plain and linear and not (channel_rows and rule.objective == "l2")
