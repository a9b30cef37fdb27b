"""Sizes of a run in closed form, without torch: parameters, state, memory per rank, operations.

They follow the parameterisation of `miras_megatron.layers` and `miras_megatron.model`; a test compares
the parameter count with the built model's for every block and option.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .choices import Choices
from .context import pieces_of
from .rule_table import facts_of
from .schema import MEMORY_LETTERS, Run

FLOAT32 = 4


@dataclass(frozen=True)
class Sizes:
    """What --dry-run prints."""

    parameters: int
    """of the whole model, the padded embedding included"""
    embedding_parameters: int
    """of these, in embedding and output layer"""
    state_bytes: int
    """to go on with one sequence, whatever its length; full attention's growing cache is not in it"""
    weights_bytes: int
    """a rank: weights, gradients, optimizer"""
    saved_state_bytes: int
    """a rank: memory states kept for the backward of one microbatch, in one piece and at the pieces' borders"""
    logits_bytes: int
    """a rank: logits that are held at once and their gradient"""
    tokens_per_step: int
    flops_per_token: float
    """forward and backward, counted matrix products, a multiply-add as 2"""

    @property
    def rank_bytes(self) -> int:
        """What a rank surely needs; activations of the layers come on top."""
        return self.weights_bytes + self.saved_state_bytes + self.logits_bytes


TILE = 64
"""Tokens the scan walks at once, however long the chunk."""


def sizes_of(run: Run, vocab_size: int | None = None, world_size: int = 1) -> Sizes:
    """The sizes of `run` with a tokenizer of `vocab_size` tokens."""
    layers, embedding = layer_parameters(run), embedding_parameters(run, vocab_size)
    total = layers + embedding + run.model.hidden
    tensor, pipeline = run.parallel.tensor, run.parallel.pipeline
    return Sizes(
        parameters=total,
        embedding_parameters=embedding,
        state_bytes=state_bytes(run),
        weights_bytes=int((layers // pipeline + embedding) // tensor * _bytes_per_weight(run, world_size)),
        saved_state_bytes=_saved_state_bytes(run) // (tensor * pipeline) + borders_bytes(run),
        logits_bytes=_logits_bytes(run, vocab_size),
        tokens_per_step=run.tokens_per_step,
        flops_per_token=train_flops_per_token(run, vocab_size),
    )


def _bytes_per_weight(run: Run, world_size: int) -> float:
    """Weight, gradient, and moments with, of bf16, the master: each over the ranks that share it.

    With ZeRO 2 and 3 gradients of one backward pass are whole in the weights' dtype, only their sum is shared.

    DeepSpeed keeps a master of float32 weights too; what is offloaded takes nothing here.
    """
    optimizer, bf16 = run.optimizer, run.training.precision == "bf16"
    ranks = max(world_size // (run.parallel.tensor * run.parallel.pipeline), 1)
    weight, gradient, state = (2 if bf16 else 4), 4, (12 if bf16 else 8)
    if optimizer.engine == "megatron":
        return weight + gradient + state / (ranks if optimizer.distributed else 1)
    stage = optimizer.zero_stage
    kept = 0 if optimizer.offload else 12 if stage > 0 else state
    gradients = gradient if stage < 2 else weight + gradient / ranks
    return weight / (ranks if stage == 3 else 1) + gradients + kept / (ranks if stage > 0 else 1)


# -- parameters --------------------------------------------------------------------------------------
def embedding_parameters(run: Run, vocab_size: int | None = None) -> int:
    """Embedding, and the output layer where it is not tied."""
    return (1 if run.model.tie_embeddings else 2) * run.model.padded_vocab(vocab_size) * run.model.hidden


def layer_parameters(run: Run) -> int:
    """All layers: mixer, MLP, two norms each."""
    model = run.model
    around = 3 * model.hidden * model.ffn_width + 2 * model.hidden
    return sum(MIXERS[letter](run) + around for letter in model.letters)


def _persistent(run: Run) -> int:
    return run.model.persistent_tokens * run.model.hidden


def memory_only(run: Run) -> int:
    """LMM: memory, norm, output gate, output projection."""
    hidden = run.model.hidden
    return memory_core(run) + hidden + 2 * hidden**2 + (_persistent(run) if run.model.write_persistent else 0)


def attention_only(run: Run) -> int:
    """Full attention: q, k, v and output."""
    return 4 * run.model.hidden**2


def window_only(run: Run) -> int:
    """Sliding window: attention and persistent rows."""
    return attention_only(run) + _persistent(run)


def memory_as_gate(run: Run) -> int:
    """MAG: memory, attention with its output projection, persistent rows, two norms."""
    return memory_core(run) + window_only(run) + 2 * run.model.hidden


def memory_as_context(run: Run) -> int:
    """MAC: as MAG, one more norm for what is read, and the learned memory queries where there are any."""
    return memory_as_gate(run) + (1 + run.model.memory_tokens) * run.model.hidden


MIXERS: dict[str, Callable[[Run], int]] = {
    "m": memory_only,
    "c": memory_as_context,
    "g": memory_as_gate,
    "w": window_only,
    "a": attention_only,
}


def memory_core(run: Run) -> int:
    """Projections to q, k, v, convolutions, gates, and the slow parameters of the memory."""
    model, facts = run.model, facts_of(run.memory)
    paths = 3 * model.hidden**2 + 3 * model.conv * model.hidden
    return paths + _gate_parameters(run, facts) + model.heads * _slow_parameters(facts, model.head_dim)


def _slow_parameters(facts: Choices, head_dim: int) -> int:
    """Of one head: W_0 of every matrix, LN, Memora's scales, coefficients of polynomial features."""
    matrices = sum(out * width for out, width in facts.shapes(head_dim))
    norm = 2 * head_dim if facts.layer_norm else 0
    scales = facts.depth if facts.retention == "kl" else 0
    return matrices + norm + scales + (facts.degree + 1 if facts.degree > 1 else 0)


def gate_widths(run: Run, facts: Choices) -> dict[str, list[int]]:
    """Gate name -> values a head and token of each of its slots (one slot a matrix, or one for all)."""
    takes = {
        "log_keep": facts.keep and not facts.fixed_keep,
        "momentum": facts.momentum,
        "lr": facts.write_rate == "input",
        "lr_prev": facts.two_rates,
    }
    layered = _layer_widths(run, facts)
    slots = {name: layered for name, used in takes.items() if used}
    if facts.takes_delta:
        slots["delta"] = [run.model.head_dim if run.memory.gates == "channel" else 1]
    if facts.window > 1 and not facts.two_rates:
        slots["window"] = [facts.window]
    return slots


def _layer_widths(run: Run, facts: Choices) -> list[int]:
    """Width of a layered gate on each matrix: channels act on the last one's rows, the first one's columns."""
    width = run.model.head_dim if run.memory.gates == "channel" else 1
    first = width if facts.degree == 1 or (facts.depth == 1 and facts.gate_side == "rows") else 1
    widths = [first if i == 0 else width if i == facts.depth - 1 else 1 for i in range(facts.depth)]
    return widths if run.memory.gates_per_layer or len(set(widths)) > 1 else widths[:1]


def _gate_parameters(run: Run, facts: Choices) -> int:
    model, memory = run.model, run.memory
    slots = gate_widths(run, facts)
    bias = model.heads * sum(sum(widths) for widths in slots.values())
    projections = 0
    for name, widths in slots.items():
        if name == "delta" and memory.delta == "constant":
            continue
        out = model.heads * sum(widths)
        low_rank = memory.gates == "channel"
        projections += model.hidden * memory.gate_rank + memory.gate_rank * out if low_rank else model.hidden * out
    return bias + projections


# -- state -------------------------------------------------------------------------------------------
def memory_state_numbers(run: Run) -> int:
    """float32 numbers of a layer's memory state, all heads: weights, momentum, anchor, the tail of a windowed rule."""
    facts, model = facts_of(run.memory), run.model
    shapes = facts.shapes(model.head_dim)
    copies = 1 + int(facts.momentum) + int(not facts.exact)
    tail = (facts.window - 1) * (shapes[0][1] + model.head_dim * (1 + int(facts.takes_delta)))
    return model.heads * (copies * sum(out * width for out, width in shapes) + tail)


def state_bytes(run: Run) -> int:
    """Of one sequence, whatever its length: memories, convolution tails, attention windows, MAC's open segment.

    The cache of full attention (letter a) grows with the sequence and is not in it.
    """
    model = run.model
    numbers = 2 if run.training.precision == "bf16" else FLOAT32
    memory, tail = memory_state_numbers(run) * FLOAT32, max(model.conv - 1, 0) * model.hidden * numbers
    window = (model.window - 1) * (2 * model.hidden + 1) * numbers
    rows = 2 * (model.segment + (model.memory_tokens or model.segment)) * model.hidden * numbers
    each = {
        "m": memory + 3 * tail,
        "g": memory + 3 * tail + window,
        "c": 2 * memory + (3 if model.memory_tokens else 4) * tail + rows,
        "w": window,
        "a": 0,
    }
    return sum(each[letter] for letter in model.letters)


# -- what grows with the row where it is walked in pieces ----------------------------------------------
BATCH_BYTES = 8 + 8 + 4
"""Of a token: itself and its label in int64, its weight in float32."""

LOSS_BYTES = 4 + 4 + 1
"""Of a token: its loss in float32, the loss's gradient, and whether it counts."""


def row_bytes(run: Run) -> int:
    """Of one microbatch on a rank, whatever the model: whole rows as read, and the rank's slice of them."""
    rows, ranks = run.training.micro_batch * run.data.sequence_length, run.parallel.context
    return rows * BATCH_BYTES + (rows // ranks) * (LOSS_BYTES + (BATCH_BYTES if ranks > 1 else 0))


def borders_bytes(run: Run) -> int:
    """States and halos kept at the left borders of a rank's pieces for their replay.

    A row's first piece has none; a rank's last keeps its graph where there is no pipeline, and one of every
    parallel.replay_every is kept. Micro-batches in flight (forwards ahead, a pipeline) each have their own.
    """
    parallel, pieces = run.parallel, pieces_of(run)
    if pieces == 1:
        return 0
    replayed = pieces - 1 if parallel.pipeline == 1 else pieces
    kept = -(-replayed // parallel.replay_every) - (parallel.context == 1)
    return max(kept, 0) * run.training.micro_batch * state_bytes(run) // (parallel.tensor * parallel.pipeline)


def _piece_tokens(run: Run) -> int:
    """Of one row, in one piece of a rank."""
    return -(-run.data.sequence_length // (run.parallel.context * pieces_of(run)))


LOGITS_AT_ONCE = 1 << 25
"""Most logits of a rank that the loss holds at once; sequence parallelism takes all of a piece."""


def _logits_bytes(run: Run, vocab_size: int | None) -> int:
    logits = run.training.micro_batch * _piece_tokens(run) * run.model.padded_vocab(vocab_size) // run.parallel.tensor
    return 2 * FLOAT32 * (logits if run.parallel.sequence else min(logits, LOGITS_AT_ONCE))


def _saved_state_bytes(run: Run) -> int:
    """States kept every checkpoint_every chunks for the backward of one piece; with recompute one layer's at a time."""
    memory = run.memory
    spans = -(-_piece_tokens(run) // (memory.chunk_size * memory.checkpoint_every))
    layers = sum(letter in MEMORY_LETTERS for letter in run.model.letters)
    kept = min(layers, 1) if run.training.recompute else layers
    return kept * spans * run.training.micro_batch * memory_state_numbers(run) * FLOAT32


# -- operations --------------------------------------------------------------------------------------
def train_flops_per_token(run: Run, vocab_size: int | None = None) -> float:
    """Forward and backward (twice the forward), without what is computed again."""
    model = run.model
    forward = 2.0 * model.hidden * model.padded_vocab(vocab_size)
    for letter in model.letters:
        forward += 6 * model.hidden * model.ffn_width + _mixer_flops(run, letter)
    return 3 * forward


def _mixer_flops(run: Run, letter: str) -> float:
    model = run.model
    seen = {
        "a": run.data.sequence_length / 2,
        "w": min(model.window, run.data.sequence_length) + model.persistent_tokens,
        "c": model.segment / 2 + (model.memory_tokens or model.segment / 2) + model.persistent_tokens,
    }
    seen["g"] = seen["w"]
    attention = 8 * model.hidden**2 + 4 * model.hidden * seen[letter] if letter in seen else 0.0
    if letter not in MEMORY_LETTERS:
        return attention
    projections = 6 * model.hidden**2 + (4 * model.hidden**2 if letter == "m" else 0)
    return attention + projections + memory_flops_per_token(run) * (1.5 if letter == "c" else 1.0)


def memory_flops_per_token(run: Run) -> float:
    """One memory layer's scan, all heads, forward: read, prediction, gradient, write, and the products inside a chunk.

    For each matrix [out, in]: read and predict with the anchor (4 out in), write into the state
    (2 out in), send the error back through all but the first (2 out in); inside a chunk of C tokens a
    read meets the writes as queries meet keys, 2 (out + in) C for the square that is computed, C at most a
    tile. Momentum is a second state to read and write (4 out in). Gates are not counted.
    """
    facts, model = facts_of(run.memory), run.model
    inside = 2 * min(run.memory.chunk_size, TILE, run.data.sequence_length)
    total = 0.0
    for i, (out, width) in enumerate(facts.shapes(model.head_dim)):
        passes = (6 if i == 0 else 8) + (4 if facts.momentum else 0)
        total += passes * out * width + inside * (out + width)
    return model.heads * total
