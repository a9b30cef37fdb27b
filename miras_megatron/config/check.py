"""What must fit together in a run, told all at once and before any device is touched.

Torch-free, so that a login node can say it; which choices of a memory rule go together included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isfinite

from .context import context_problems
from .engines import engine_problems
from .errors import ConfigError
from .rule_table import rule_problems
from .schema import BLOCK_PATTERNS, MEMORY_LETTERS, PATTERN_LETTERS, Run, flatten
from .stability import stable_lr
from .words import counted

Problems = Iterator[str]


def check_run(run: Run, source: str, world_size: int = 1) -> None:
    """Raise ConfigError with every problem of `run` on `world_size` ranks; return where there is none."""
    problems = list(find_problems(run, world_size))
    if problems:
        raise ConfigError(source, problems)


def find_problems(run: Run, world_size: int = 1) -> Problems:
    """Every problem, one line each: field, value, rule, way out."""
    for part in (_ranges, _pattern, _divisibility):
        yield from part(run)
    yield from rule_problems(run.memory)
    for part in (_data, _needles, _schedule, engine_problems, context_problems):
        yield from part(run)
    yield from _ranks(run, world_size)


def find_warnings(run: Run) -> Problems:
    """What will run, but probably not as hoped; one line each."""
    memory, model = run.memory, run.model
    if run.optimizer.warmup_steps > run.training.steps:
        yield (
            f"optimizer.warmup_steps = {run.optimizer.warmup_steps}: longer than training.steps = "
            f"{run.training.steps}; the learning rate never reaches optimizer.lr"
        )
    if run.training.watchdog >= run.parallel.timeout:
        yield (
            f"training.watchdog = {run.training.watchdog:g}: not below parallel.timeout = {run.parallel.timeout:g}, so "
            "a step that hangs ends by that, without every rank's stack"
        )
    if not MEMORY_LETTERS & set(model.letters):
        return
    bound = stable_lr(run)
    if memory.lr_max is not None and memory.lr_max > bound:
        yield (
            f"memory.lr_max = {memory.lr_max:g}: above {bound:.2g}, where this memory is stable at the start "
            f"of training; a smaller memory.chunk_size allows more"
        )
    if memory.chunk_size > run.data.sequence_length:
        yield (
            f"memory.chunk_size = {memory.chunk_size}: longer than a row of data.sequence_length "
            f"= {run.data.sequence_length}; within a row every gradient is taken at the learned start"
        )
    if run.horizon < run.data.sequence_length:
        yield (
            f"memory.horizon = {run.horizon:g}: shorter than data.sequence_length = {run.data.sequence_length}; "
            f"the start of a row is half forgotten before its end"
        )


POSITIVE = (
    "model.layers model.hidden model.heads model.pad_vocab_to model.window model.segment model.rope_base "
    "model.norm_eps model.init_std memory.chunk_size memory.checkpoint_every memory.gate_rank memory.delta_init "
    "parallel.tensor parallel.pipeline parallel.context parallel.timeout parallel.replay_every data.sequence_length "
    "training.steps training.micro_batch "
    "training.global_batch training.spike_loss training.state_norm_limit optimizer.lr optimizer.eps "
    "logging.every logging.profile_steps evaluate.batches "
    "evaluate.needle_samples"
).split()
POSITIVE_OR_NULL = ("model.ffn model.vocab_size memory.horizon memory.lr_max logging.peak_tflops").split()
AT_LEAST_ZERO = (
    "model.persistent_tokens model.memory_tokens model.conv data.workers optimizer.min_lr optimizer.warmup_steps "
    "optimizer.weight_decay optimizer.clip checkpoint.every checkpoint.keep logging.memory_every "
    "logging.gradients_every logging.trace_step logging.profile_start evaluate.every evaluate.position_buckets "
    "training.seed training.patience training.watchdog data.seed"
).split()
AT_MOST: dict[str, tuple[int, str]] = {
    "training.seed": (2**43, "each layer's generator is seeded by a multiple of it, below 2^64"),
    "data.seed": (2**63 - 1, "it is hashed in 64 bits"),
    "training.steps": (99_999_999, "checkpoints are named by eight digits"),
    "data.workers": (1024, "each is a thread of every rank"),
    "parallel.timeout": (10_000_000, "seconds; that is 116 days"),
    "training.watchdog": (10_000_000, "seconds; that is 116 days"),
}
"""Field -> the largest value, and why there is one."""
FRACTIONS = "memory.lr_init memory.momentum_init optimizer.beta1 optimizer.beta2".split()


def _value(run: Run, name: str) -> float | None:
    section, _, field = name.partition(".")
    value: float | None = getattr(getattr(run, section), field)
    return value


def _ranges(run: Run) -> Problems:
    rules: tuple[tuple[list[str], Callable[[float], bool], str], ...] = (
        (POSITIVE, lambda x: x > 0, "must be above 0"),
        (POSITIVE_OR_NULL, lambda x: x > 0, "must be above 0, or null"),
        (AT_LEAST_ZERO, lambda x: x >= 0, "must be at least 0"),
        (FRACTIONS, lambda x: 0 < x < 1, "must be between 0 and 1"),
    )
    for name, number in flatten(run).items():
        if isinstance(number, float) and not isfinite(number):
            yield f"{name} = {number}: must be a finite number"
    for name, (most, reason) in AT_MOST.items():
        if (value := _value(run, name)) is not None and value > most:
            yield f"{name} = {value}: must be at most {most} ({reason})"
    if not run.run.dir or "\0" in run.run.dir:
        yield f"run.dir = {run.run.dir!r}: must name a folder, such as runs/mine"
    for names, holds, text in rules:
        for name in names:
            value = _value(run, name)
            if value is not None and not holds(value):
                yield f"{name} = {value}: {text}"
    if run.memory.horizon_spread < 1:
        yield f"memory.horizon_spread = {run.memory.horizon_spread}: must be at least 1 (1 = the same for all heads)"


def _pattern(run: Run) -> Problems:
    block, pattern, layers = run.model.block, run.model.pattern, run.model.layers
    if block is not None and pattern is not None:
        yield (
            f"model.block = {block!r} and model.pattern = {pattern!r}: one is shorthand for the other; "
            "give one, and take the other out with --model.block=null or --model.pattern=null"
        )
        return
    if not block and not pattern:
        yield f"model.block = null and model.pattern = null: give one; block is {', '.join(BLOCK_PATTERNS)}"
        return
    unit = pattern or BLOCK_PATTERNS[block or ""]
    unknown = sorted(set(unit) - set(PATTERN_LETTERS))
    if unknown:
        known = ", ".join(f"{letter} {what}" for letter, what in PATTERN_LETTERS.items())
        yield f"model.pattern = {pattern!r}: unknown letter {', '.join(unknown)}; there are {known}"
    if layers > 0 and layers % len(unit):
        nearest = max(len(unit), layers // len(unit) * len(unit))
        yield f"model.layers = {layers}: not a multiple of the {len(unit)} letters of {unit!r}; nearest {nearest}"


def _divisibility(run: Run) -> Problems:
    model, tensor = run.model, run.parallel.tensor
    if model.heads > 0 and model.hidden % model.heads:
        nearest = max(1, model.hidden // model.heads) * model.heads
        yield f"model.hidden = {model.hidden}: not divisible by model.heads = {model.heads}; nearest {nearest}"
    elif model.heads > 0 and model.head_dim % 2 and set(model.letters) & set("cgwa"):
        yield f"model.heads = {model.heads}: heads of {model.head_dim} channels; rotary positions need an even number"
    for name, value in (("heads", model.heads), ("ffn", model.ffn_width), ("pad_vocab_to", model.pad_vocab_to)):
        if tensor > 0 and value % tensor:
            yield f"parallel.tensor = {tensor}: model.{name} = {value} is not divisible by it"
    if run.parallel.pipeline > 0 and model.layers % run.parallel.pipeline:
        yield f"parallel.pipeline = {run.parallel.pipeline}: model.layers = {model.layers} is not divisible by it"


def _ranks(run: Run, world_size: int) -> Problems:
    parallel, training = run.parallel, run.training
    if parallel.sequence and parallel.tensor == 1:
        yield "parallel.sequence = true: only with parallel.tensor above 1; set false"
    if parallel.sequence and parallel.tensor > 1 and run.data.sequence_length % parallel.tensor:
        yield (
            f"data.sequence_length = {run.data.sequence_length}: with parallel.sequence a multiple of "
            f"parallel.tensor = {parallel.tensor}"
        )
    if min(parallel.model_ranks, training.micro_batch, training.global_batch) < 1:
        return
    if world_size % parallel.model_ranks:
        yield (
            f"parallel.tensor x pipeline x context = {parallel.model_ranks}: this job has "
            f"{counted(world_size, 'rank')}, which is no multiple; start "
            f"{parallel.model_ranks} (torchrun --nproc-per-node, miras-launch --ranks)"
        )
        return
    rows = training.micro_batch * run.data_ranks(world_size)
    if training.global_batch % rows:
        nearest = max(1, round(training.global_batch / rows)) * rows
        yield (
            f"training.global_batch = {training.global_batch}: not a multiple of training.micro_batch x "
            f"data-parallel ranks = {rows}; nearest {nearest}{_ranks_that_fit(run, world_size)}"
        )


def _ranks_that_fit(run: Run, world_size: int) -> str:
    """For a run that goes on and may not change its batch: how many ranks share it, at most as many as there are."""
    batch, rows = run.training.global_batch, run.training.micro_batch
    fit = [ranks for ranks in range(1, run.data_ranks(world_size)) if batch % (rows * ranks) == 0]
    return f"; or keep it and start {counted(fit[-1] * run.parallel.model_ranks, 'rank')}" if fit else ""


def _data(run: Run) -> Problems:
    data = run.data
    for name in ("train_blend", "validation_blend", "split_shares"):
        try:
            getattr(data, name)
        except ValueError as error:
            field = name.split("_")[0]
            yield f"data.{field} = {getattr(data, field)!r}: {error}"


def _needles(run: Run) -> Problems:
    needles, data = run.data.needles, run.data
    if needles is None:
        return
    for name in ("rows", "long_rows"):
        if not 0 <= getattr(needles, name) <= 1:
            yield f"data.needles.{name} = {getattr(needles, name)}: a share, 0 to 1"
    for name in ("per_row", "questions", "key_bytes", "long_factor"):
        if getattr(needles, name) < 1:
            yield f"data.needles.{name} = {getattr(needles, name)}: must be at least 1"
    letters = needles.alphabet
    if len(set(letters)) != len(letters) or len(letters) < 2 or not letters.isascii():
        yield f"data.needles.alphabet = {letters!r}: must be at least two different one-byte characters"
    if not needles.marker:
        yield "data.needles.marker = '': must not be empty"
    if data.tokenizer != "bytes":
        yield f"data.tokenizer = {data.tokenizer!r}: data.needles are planted in bytes; set bytes, or needles: null"
    if any(length < 1 for length in run.evaluate.needle_lengths):
        yield f"evaluate.needle_lengths = {run.evaluate.needle_lengths}: each must be at least 1 training row"
    if needles.answer_weight < 1 or needles.answer_weight != int(needles.answer_weight):
        yield (
            f"data.needles.answer_weight = {needles.answer_weight}: must be a whole number of at least 1: "
            f"the loss is divided by a count of whole tokens; set {max(1, round(needles.answer_weight))}"
        )
    planted = (1 + needles.questions) * needles.per_row * (len(needles.marker.encode()) + needles.key_bytes + 1)
    if planted > data.sequence_length:
        yield (
            f"data.needles.per_row = {needles.per_row}: needles and questions take {planted} tokens of "
            f"data.sequence_length = {data.sequence_length}; plant fewer"
        )


def _schedule(run: Run) -> Problems:
    optimizer = run.optimizer
    if optimizer.min_lr > optimizer.lr:
        yield f"optimizer.min_lr = {optimizer.min_lr}: above optimizer.lr = {optimizer.lr}"
    if optimizer.decay_steps is not None and optimizer.decay_steps < 1:
        yield f"optimizer.decay_steps = {optimizer.decay_steps}: must be at least 1, or null"
    if run.training.spike_norm <= 1:
        yield f"training.spike_norm = {run.training.spike_norm}: must be above 1, times the median gradient norm"
    for kind in ("nan", "spike", "divergence"):
        if getattr(run.training, f"on_{kind}") == "roll_back" and run.checkpoint.every == 0:
            yield f"training.on_{kind} = 'roll_back': checkpoint.every = 0 saves nothing to go back to; set both"
    if run.training.on_divergence != "ignore" and not (
        run.logging.memory_every and MEMORY_LETTERS & {*run.model.letters}
    ):
        yield (
            f"training.on_divergence = {run.training.on_divergence!r}: memories are looked at on the steps of "
            f"logging.memory_every = {run.logging.memory_every}, in layers {', '.join(sorted(MEMORY_LETTERS))}; "
            "give both, or set it to ignore"
        )
    if not run.checkpoint.resume:
        yield "checkpoint.resume = '': must be auto, never, or the path of a checkpoint"
