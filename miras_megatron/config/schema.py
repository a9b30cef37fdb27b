"""What a run is: one frozen dataclass a section, one docstring line a field, with its unit.

Plain data and values derived from it. Parsing is in `load`, what must fit together in `check`,
closed-form sizes in `sizes`. Imports the standard library only: a login node without torch reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from math import inf
from pathlib import PurePath
from typing import Any, Literal

BLOCK_PATTERNS = {"lmm": "m", "mac": "c", "mag": "g", "mal": "mw", "attention": "a"}
"""`model.block` -> the letters that are repeated over the layers."""

PATTERN_LETTERS = {
    "m": "memory only (LMM)",
    "c": "memory as context (MAC)",
    "g": "memory as gate (MAG)",
    "w": "sliding-window attention",
    "a": "full attention",
}

MEMORY_LETTERS = frozenset("mcg")


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """Where everything of this run lies."""

    dir: str = "runs/unnamed"
    """folder of the run: config.yaml, metrics.jsonl, tb/, checkpoints/"""
    name: str = ""
    """what logs call it; empty = the last part of run.dir"""

    @property
    def title(self) -> str:
        """The name, or the folder's."""
        return self.name or PurePath(self.dir).name


@dataclass(frozen=True, kw_only=True)
class Model:
    """The network around the memory."""

    block: Literal["lmm", "mac", "mag", "mal", "attention"] | None = None
    """a uniform pattern by name: lmm = m, mac = c, mag = g, mal = mw, attention = a; give this or model.pattern"""
    pattern: str | None = None
    """one letter a layer, repeated to fill model.layers: m LMM, c MAC, g MAG, w window attention, a full attention"""
    layers: int = 2
    """layers, each with its MLP"""
    hidden: int = 128
    """width of the residual stream, channels"""
    heads: int = 2
    """heads of memory and of attention; head width = hidden / heads"""
    ffn: int | None = None
    """width of the SwiGLU MLP, channels; null = 8/3 hidden rounded up to a multiple of 64"""
    vocab_size: int | None = None
    """tokens the model knows; null = the tokenizer's"""
    pad_vocab_to: int = 64
    """the embedding's rows are padded to a multiple of this; a multiple of parallel.tensor"""
    tie_embeddings: bool = True
    """the output layer is the embedding transposed"""
    conv: int = 4
    """taps of the causal depthwise convolution on q, k, v, tokens; 0 = none"""
    persistent_tokens: int = 16
    """learned rows that attention always sees, tokens; 0 = none (letters c, g, w)"""
    write_persistent: bool = False
    """whether the memory also writes the persistent rows at every document start"""
    window: int = 256
    """attention window of letters g and w, tokens, the token itself counted"""
    segment: int = 64
    """segment of letter c: attention sees this many tokens, persistent rows and memory reads"""
    memory_tokens: int = 0
    """letter c: learned memory queries a segment, tokens; 0 = one memory read a segment token, seen causally"""
    rope_base: float = 10000.0
    """base of the rotary positions of attention (none on memory)"""
    norm_eps: float = 1e-6
    """epsilon of RMSNorm"""
    init_std: float = 0.02
    """standard deviation of linear layers at the start; output projections have it over sqrt(2 layers)"""

    @property
    def letters(self) -> str:
        """The pattern letter of every layer; empty where neither block nor pattern is given."""
        unit = self.pattern or BLOCK_PATTERNS.get(self.block or "", "")
        return (unit * self.layers)[: self.layers]

    @property
    def head_dim(self) -> int:
        """Head width, channels."""
        return self.hidden // self.heads

    @property
    def ffn_width(self) -> int:
        """Width of the MLP, channels."""
        return self.ffn if self.ffn is not None else -(-(8 * self.hidden // 3) // 64) * 64

    def padded_vocab(self, vocab_size: int | None = None) -> int:
        """Rows of the embedding for a tokenizer of `vocab_size` tokens (model.vocab_size wins where given)."""
        size = self.vocab_size if self.vocab_size is not None else vocab_size
        if size is None:
            raise ValueError("model.vocab_size = null: the tokenizer's size is not known here; set model.vocab_size")
        return -(-size // self.pad_vocab_to) * self.pad_vocab_to


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of every memory layer: a named rule, its gates and its chunks."""

    rule: str = "titans"
    """a named rule: titans, titans_linear, moneta, yaad, memora, deltanet, ... (memory.RULES, config.rule_table)"""
    depth: int | None = None
    """matrices of the memory, 1 to 4; null = the rule's own, 1 = linear memory"""
    expansion: int | None = None
    """hidden width of the memory over head width; null = the rule's own"""
    init: Literal["fan_in", "wide_input", "unit", "zeros"] | None = None
    """spread of the learned start W_0; null = the rule's own"""
    momentum: bool | None = None
    """ablation: false takes the momentum out; null = the rule's own"""
    keep: bool | None = None
    """ablation: false takes forgetting out; null = the rule's own"""
    options: dict[str, Any] = field(default_factory=dict)
    """any further keyword of make_rule: {objective: lp, p: 3, max_gradient_norm: 1.0, ...}"""
    chunk_size: int = 64
    """tokens that share one gradient anchor; part of the function, not a speed switch"""
    checkpoint_every: int = 8
    """chunks between two saved states; the backward recomputes between them"""
    gates: Literal["head", "channel"] = "head"
    """one gate value a head and token, or one a channel through a low-rank projection"""
    gate_rank: int = 32
    """rank of the projection of channel gates"""
    gates_per_layer: bool = True
    """whether each matrix of the memory has its own gates"""
    horizon: float | None = None
    """tokens after which half is kept at the start of training; null = data.sequence_length"""
    horizon_spread: float = 1.0
    """horizons run geometrically over heads from horizon / spread to horizon x spread; 1 = all the same"""
    lr_max: float | None = None
    """largest inner learning rate; null = the stability bound (config.stability)"""
    lr_init: float = 0.1
    """inner learning rate at the start, as a fraction of lr_max, in (0, 1)"""
    momentum_init: float = 0.1
    """momentum gate at the start, in (0, 1)"""
    delta: Literal["input", "constant"] = "input"
    """threshold of Huber rules: from the token, or a learned constant a head (ablation)"""
    delta_init: float = 1.0
    """that threshold at the start, in units of the error's norm"""

    @property
    def choices(self) -> dict[str, Any]:
        """The keywords for make_rule: what is given here, null left out, over memory.options."""
        named = ("depth", "expansion", "init", "momentum", "keep")
        return dict(self.options) | {k: getattr(self, k) for k in named if getattr(self, k) is not None}


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How ranks share the work; data-parallel ranks are those left over."""

    tensor: int = 1
    """ranks that share the heads and the MLP of each layer"""
    pipeline: int = 1
    """ranks that share the layers"""
    context: int = 1
    """ranks that share a sequence"""
    sequence: bool = False
    """with tensor > 1: norms and residuals are split along the sequence too"""
    carry: Literal["auto", "local", "relay", "scan", "heads"] = "auto"
    """how memory states cross ranks: relay (every rule), scan (affine rules), heads (ranks trade tokens for heads)"""
    pieces: int | Literal["auto"] = "auto"
    """parts of a rank's slice that go through all layers one after the other; each is computed again in backward"""
    head_groups: int | Literal["auto"] = "auto"
    """relay: groups of heads scanned and sent one after the other; MAC has one"""
    forwards_ahead: int | Literal["auto"] = "auto"
    """micro-batches whose forward runs ahead of the backward; their states are kept"""
    keep_states: Literal["device", "host"] = "device"
    """where the states at piece borders wait for the backward"""
    replay_every: int = 1
    """pieces between two borders whose states are kept; those between are made again. Above 1 only with context = 1"""
    timeout: float = 600.0
    """seconds that any wait for another rank may take"""

    @property
    def model_ranks(self) -> int:
        """Ranks one replica of the model takes."""
        return self.tensor * self.pipeline * self.context


@dataclass(frozen=True, kw_only=True)
class Needles:
    """Facts planted into training rows and asked for later in the same row."""

    rows: float = 0.5
    """share of rows that carry needles, 0 to 1"""
    per_row: int = 6
    """needles a row of data.sequence_length tokens"""
    marker: str = "@"
    """text that opens a needle and, later, its question"""
    questions: int = 1
    """times each needle is asked for in its row"""
    answer_weight: float = 1.0
    """weight of an answer in the loss; other tokens have 1, keys and values told for the first time 0"""
    key_bytes: int = 2
    """length of a key, bytes; capital letters"""
    alphabet: str = "0123456789"
    """the one-byte values; chance is 1 / their number"""
    long_rows: float = 0.1
    """share of steps whose rows are longer, 0 to 1"""
    long_factor: int = 8
    """how many times longer those rows are; the batch has so many times fewer rows (at least 1)"""


@dataclass(frozen=True, kw_only=True)
class Data:
    """What the model reads."""

    train: str | list[str] = "shipped"
    """prefix of PREFIX.bin and PREFIX.idx, or a list of "weight prefix"; "shipped" = the text in the package"""
    validation: str | list[str] | None = None
    """the same for validation; null = the second share of data.split"""
    split: str = "99,1,0"
    """shares of documents for training, validation and test, in percent"""
    sequence_length: int = 256
    """tokens of a training row"""
    packing: Literal["reset", "plain", "ordered"] = "reset"
    """reset: shuffled documents, memory starts anew at each; plain: no restart; ordered: long documents in order"""
    tokenizer: str = "bytes"
    """path of a tokenizer.json, or `bytes` for one token a byte"""
    seed: int = 1234
    """seed of the shuffle"""
    workers: int = 0
    """threads that prepare batches ahead; 0 = none"""
    cache: str | None = None
    """folder of index files; null = run.dir/cache"""
    needles: Needles | None = None
    """planted facts; null = none"""

    @property
    def train_blend(self) -> list[tuple[float, str]]:
        """(weight, prefix) of every training set; weights sum to 1."""
        return blend(self.train)

    @property
    def validation_blend(self) -> list[tuple[float, str]] | None:
        """(weight, prefix) of every validation set, or None where data.split makes it."""
        return None if self.validation is None else blend(self.validation)

    @property
    def split_shares(self) -> tuple[float, float, float]:
        """Shares of documents for training, validation, test; sum 1."""
        words = self.split.split(",")
        parts = [float(x) if _is_number(x) else -1.0 for x in words] + [0.0] * (3 - len(words))
        total = sum(parts)
        if len(parts) != 3 or not all(share >= 0 for share in parts) or not 0 < total < inf:
            raise ValueError('must be three shares of at least 0 such as "99,1,0"')
        return (parts[0] / total, parts[1] / total, parts[2] / total)


def blend(entries: str | list[str]) -> list[tuple[float, str]]:
    """Weights (summing to 1) and prefixes of `data.train` or `data.validation`.

    An entry is "weight prefix", or a prefix alone, which weighs 1. Raises ValueError.
    """
    pairs = []
    for entry in [entries] if isinstance(entries, str) else entries:
        first, _, rest = entry.strip().partition(" ")
        weight, prefix = (float(first), rest.strip()) if rest and _is_number(first) else (1.0, entry.strip())
        if not 0 < weight < inf or not prefix:
            raise ValueError(f'entry {entry!r}: must be "weight prefix" with a weight above 0')
        pairs.append((weight, prefix))
    if not pairs:
        raise ValueError("must name at least one prefix")
    total = sum(weight for weight, _ in pairs)
    if total == inf:
        raise ValueError("weights add up to more than a number holds; give smaller ones")
    return [(weight / total, prefix) for weight, prefix in pairs]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class Training:
    """How long, how precisely, how much at once."""

    steps: int = 100
    """optimizer steps"""
    seed: int = 0
    """seed of weights and of everything random but the data order"""
    precision: Literal["fp32", "bf16"] = "fp32"
    """fp32, or bf16 with fp32 masters, gates and memory states"""
    micro_batch: int = 1
    """rows a rank works on at once"""
    global_batch: int = 8
    """rows of one optimizer step, over all data-parallel ranks and accumulation"""
    init_from: str | None = None
    """a checkpoint or run folder whose weights a new run starts from; null = random"""
    on_nan: Literal["stop", "skip", "roll_back"] = "stop"
    """a loss or gradient that is no number: stop and name layer and quantity; skip the step and say so; or roll back
    to the last checkpoint and go on from there with the rows that come next"""
    on_spike: Literal["ignore", "stop", "skip", "roll_back"] = "ignore"
    """the same for a step whose loss or gradient norm is far above those of the last 64"""
    spike_loss: float = 1.0
    """nats above the median of the last 64 losses that are far"""
    spike_norm: float = 10.0
    """times the median of the last 64 gradient norms that is far"""
    on_divergence: Literal["ignore", "stop", "skip", "roll_back"] = "ignore"
    """the same for a memory that runs away, on the steps of logging.memory_every"""
    state_norm_limit: float = 1e3
    """mean Frobenius norm of a head's memory (metrics.jsonl: state_norm) above which it has run away"""
    patience: int = 10
    """bad steps among the last 100, or since the last checkpoint, after which the run stops; 0 = it never does"""
    watchdog: float = 540.0
    """seconds without a sign of life after which a step, evaluation or save ends the run, with every rank's stack in
    RUN/stuck_step_N.txt; each layer that is passed is a sign. Below parallel.timeout, which tells less; 0 = off"""
    recompute: bool = False
    """each layer is computed again in the backward pass: less memory, a third more work"""
    cpu_kernel: bool = True
    """on a CPU with a C compiler and at most two threads a rank, memories of most rules are walked by a kernel that is
    compiled at the first start: half again to twice as fast; else, or false: torch's operations"""
    compact_heap: bool = False
    """on a CPU with glibc, tensors of a MiB or more go back to the system when freed: memory of long rows in pieces
    stays level and is a quarter less, a step takes a fifth to two fifths longer"""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW and its learning rate."""

    lr: float = 1e-3
    """largest learning rate"""
    min_lr: float = 0.0
    """learning rate at the end"""
    warmup_steps: int = 0
    """steps of linear warm-up"""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """after warm-up: cosine to min_lr; level then linear to min_lr (wsd); level"""
    decay_steps: int | None = None
    """cosine: the step that reaches min_lr, null = training.steps; wsd: the last steps that fall, null = a tenth"""
    beta1: float = 0.9
    """decay of the first moment"""
    beta2: float = 0.95
    """decay of the second moment"""
    eps: float = 1e-8
    """epsilon of AdamW"""
    weight_decay: float = 0.1
    """decay of matrices; not of W_0, gates, norms, convolutions, biases, embeddings, persistent tokens"""
    clip: float = 1.0
    """largest global gradient norm; 0 = no clipping"""
    distributed: bool = False
    """moments and fp32 masters are shared by data- and context-parallel ranks; same numbers, same checkpoints"""
    engine: Literal["megatron", "deepspeed"] = "megatron"
    """who sums gradients and updates: megatron-core, or DeepSpeed's ZeRO (docs/zero.md)"""
    zero: int | None = None
    """deepspeed: its stage. 0 nothing is shared, 1 moments and masters, 2 gradients too, 3 weights too; null = 1"""
    offload: bool = False
    """deepspeed: moments and masters lie in host memory, updated by DeepSpeed's CPU AdamW"""

    @property
    def zero_stage(self) -> int:
        """The stage of ZeRO, where engine is deepspeed."""
        return 1 if self.zero is None else self.zero

    @property
    def shares_weights(self) -> bool:
        """Whether a rank has a weight whole only while its module works."""
        return self.engine == "deepspeed" and self.zero_stage == 3


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When the run is saved and how it goes on."""

    every: int = 500
    """steps between checkpoints; 0 = only at the end"""
    keep: int = 2
    """checkpoints kept, the newest; 0 = all"""
    background: bool = False
    """a copy is taken and written while training goes on: steps don't wait for the disk, for the price of one more copy
    of a rank's share of weights and moments in the host's memory"""
    resume: str = "auto"
    """auto: go on from the newest in run.dir if there is one; never: start anew (run.dir must hold none); or a path"""


@dataclass(frozen=True, kw_only=True)
class Logging:
    """What is written while training."""

    every: int = 1
    """steps between lines on the console; metrics.jsonl has every step"""
    memory_every: int = 10
    """steps between records of the inner loop (surprise, norms, gates, inner loss) a layer; 0 = never"""
    gradients_every: int = 0
    """steps between lines of gradients.jsonl: the norm of every parameter's gradient, for miras-compare; 0 = never"""
    trace_step: int = 0
    """the step of which RUN/trace_step_N.json shows, rank by rank, pieces, scans, waits (Chrome's format); 0 = none"""
    tensorboard: bool = True
    """writes run.dir/tb"""
    peak_tflops: float | None = None
    """matrix-product peak of one device for MFU, TFLOP/s; null = known for the device, or no MFU"""
    profile: bool = False
    """writes a torch.profiler trace to run.dir/profile"""
    profile_start: int = 5
    """first step of the trace, counted from where this process starts"""
    profile_steps: int = 3
    """steps of the trace"""


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Validation while training and at its end."""

    every: int = 0
    """steps between validations; 0 = only at the end"""
    batches: int = 16
    """global batches a validation"""
    position_buckets: int = 8
    """equal parts of the row whose loss is also reported, each on its own; 0 = none"""
    needle_lengths: list[int] = field(default_factory=lambda: [1, 4, 16, 64])
    """lengths of the final needle test, in training rows (data.sequence_length); only with data.needles"""
    needle_samples: int = 256
    """questions a length; beyond 16 rows a quarter of them"""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One complete run: one file, no inheritance."""

    run: RunFolder = field(default_factory=RunFolder)
    """where it lies"""
    model: Model = field(default_factory=Model)
    """the network around the memory"""
    memory: Memory = field(default_factory=Memory)
    """the memory"""
    parallel: Parallel = field(default_factory=Parallel)
    """how ranks share the work"""
    data: Data = field(default_factory=Data)
    """what it reads"""
    training: Training = field(default_factory=Training)
    """how long and how much at once"""
    optimizer: Optimizer = field(default_factory=Optimizer)
    """AdamW and its learning rate"""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """saving and going on"""
    logging: Logging = field(default_factory=Logging)
    """what is written"""
    evaluate: Evaluate = field(default_factory=Evaluate)
    """validation"""

    @property
    def horizon(self) -> float:
        """Tokens after which half is kept at the start of training."""
        return self.memory.horizon if self.memory.horizon is not None else float(self.data.sequence_length)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.training.global_batch * self.data.sequence_length

    def data_ranks(self, world_size: int) -> int:
        """Data-parallel ranks of a job of `world_size` ranks."""
        return world_size // self.parallel.model_ranks

    def micro_batches(self, world_size: int) -> int:
        """Microbatches a rank accumulates in one step."""
        return self.training.global_batch // (self.training.micro_batch * self.data_ranks(world_size))


CHANGEABLE_ON_RESUME = (
    "run.dir",
    "run.name",
    "parallel",
    "memory.checkpoint_every",
    "data.workers",
    "data.cache",
    "training.steps",
    "training.micro_batch",
    "training.on_nan",
    "training.watchdog",
    "training.on_spike",
    "training.spike_loss",
    "training.spike_norm",
    "training.on_divergence",
    "training.state_norm_limit",
    "training.patience",
    "training.recompute",
    "training.cpu_kernel",
    "training.compact_heap",
    "optimizer.lr",
    "optimizer.min_lr",
    "optimizer.schedule",
    "optimizer.decay_steps",
    "optimizer.weight_decay",
    "optimizer.clip",
    "optimizer.distributed",
    "optimizer.engine",
    "optimizer.zero",
    "optimizer.offload",
    "checkpoint",
    "logging",
    "evaluate",
)
"""Fields, or whole sections, a resumed run may change; any other difference is refused by name.
Changing the layout (parallel, micro_batch) keeps the data order but not the last bits of the sums."""


def flatten(run: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted field name -> value, for every field of every section."""
    flat: dict[str, Any] = {}
    for f in fields(run):
        value = getattr(run, f.name)
        if is_dataclass(value):
            flat |= flatten(value, f"{prefix}{f.name}.")
        else:
            flat[prefix + f.name] = value
    return flat


def refused_on_resume(saved: Run, now: Run) -> dict[str, tuple[Any, Any]]:
    """Fields that differ and may not: dotted name -> (saved, now). Empty where the run may go on."""
    before, after = flatten(saved), flatten(now)
    return {
        name: (before.get(name), after.get(name))
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
        and not any(name == free or name.startswith(free + ".") for free in CHANGEABLE_ON_RESUME)
    }
