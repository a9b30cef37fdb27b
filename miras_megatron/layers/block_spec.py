"""The sizes and choices of one mixer block, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..memory import Rule, make_rule


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """What every block is built from; each reads what concerns it.

    hidden, heads      width of the residual stream; heads of memory and of attention (over all ranks)
    rule               the memory's rule, from `make_rule`
    chunk_size         tokens that share a gradient anchor
    checkpoint_every   chunks between two saved states
    window             sliding window, tokens, the token itself counted
    segment            MAC's attention block, tokens
    memory_tokens      MAC: learned memory queries a segment; 0 = one memory read per segment token
    persistent_tokens  learned rows that attention always sees; 0 = none
    write_persistent   LMM and MAG: the memory writes those rows at every document start
    conv               taps of the causal depthwise convolution; 0 = none
    gates              `head` (one value a head and token) or `channel` (low rank, `gate_rank`)
    gates_per_layer    each matrix of the memory has its own gates
    horizon            tokens after which half is kept at the start of training
    horizon_spread     horizons of heads are geometric from horizon / spread to horizon * spread
    lr_max, lr_init    largest inner rate; rate at the start as a fraction of it
    momentum_init      momentum gate at the start
    delta, delta_init  Huber threshold from the `input` or a learned `constant` per head; its start
    rope_base          base of attention's rotary positions
    norm_eps           epsilon of RMSNorm
    init_std, layers   spread of projections; output projections have it over sqrt(2 layers)
    seed               of the parameters that heads own
    """

    hidden: int
    heads: int
    rule: Rule = field(default_factory=lambda: make_rule("titans"))
    chunk_size: int = 64
    checkpoint_every: int = 8
    window: int = 256
    segment: int = 64
    memory_tokens: int = 0
    persistent_tokens: int = 0
    write_persistent: bool = False
    conv: int = 4
    gates: str = "head"
    gate_rank: int = 32
    gates_per_layer: bool = True
    horizon: float = 4096.0
    horizon_spread: float = 1.0
    lr_max: float = 0.01
    lr_init: float = 0.1
    momentum_init: float = 0.1
    delta: str = "input"
    delta_init: float = 1.0
    rope_base: float = 10000.0
    norm_eps: float = 1e-6
    init_std: float = 0.02
    layers: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise ValueError("a block can't be built:\n" + "\n".join(f"  {p}" for p in problems))

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    @property
    def out_std(self) -> float:
        """Spread of output projections."""
        return self.init_std / (2 * self.layers) ** 0.5


def _problems(spec: BlockSpec) -> list[str]:
    """What does not fit, one line each with the way out."""
    bad: list[str] = []

    def refuse(condition: bool, text: str) -> None:
        if condition:
            bad.append(text)

    refuse(
        spec.heads < 1 or spec.hidden % spec.heads != 0,
        f"hidden = {spec.hidden}: must be a multiple of heads ({spec.heads})",
    )
    refuse(spec.gates not in ("head", "channel"), f"gates = {spec.gates!r}: must be head or channel")
    refuse(spec.delta not in ("input", "constant"), f"delta = {spec.delta!r}: must be input or constant")
    for name in ("window", "segment", "chunk_size", "checkpoint_every", "gate_rank", "layers"):
        refuse(getattr(spec, name) < 1, f"{name} = {getattr(spec, name)}: must be at least 1")
    for name in ("memory_tokens", "persistent_tokens", "conv"):
        refuse(getattr(spec, name) < 0, f"{name} = {getattr(spec, name)}: must be at least 0 (0 is off)")
    for name in ("lr_init", "momentum_init"):
        refuse(
            not 0 < getattr(spec, name) < 1, f"{name} = {getattr(spec, name)}: must be between 0 and 1, both excluded"
        )
    for name in ("horizon", "horizon_spread", "lr_max", "delta_init"):
        refuse(getattr(spec, name) <= 0, f"{name} = {getattr(spec, name)}: must be above 0")
    return bad
