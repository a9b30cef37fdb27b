"""What a command says of a run before it starts: how ranks share it, and what each must hold."""

from __future__ import annotations

from dataclasses import replace

from miras_megatron.config.schema import Run
from miras_megatron.config.sizes import Sizes, sizes_of
from miras_megatron.config.words import counted
from miras_megatron.parallel.layout import decide_layout

BYTES_VOCABULARY = 257
"""ids of the tokenizer `bytes`"""


def describe_layout(run: Run, world_size: int) -> str:
    """One line: how the ranks share the work."""
    parallel, training = run.parallel, run.training
    steps = counted(run.micro_batches(world_size), "microbatch", "es")
    return (
        f"{counted(world_size, 'rank')} = {run.data_ranks(world_size)} data x {parallel.tensor} tensor x "
        f"{parallel.pipeline} pipeline x {parallel.context} context; {counted(training.global_batch, 'row')} a step in "
        f"{steps} of {training.micro_batch} a rank"
    )


def describe_memory(run: Run, world_size: int, gpu_gib: float | None = None) -> str:
    """What a rank surely needs, where the vocabulary is known without reading a tokenizer.

    gpu_gib  what a device has: a second line says so where that isn't enough
    """
    sizes = rank_sizes(run, world_size)
    if sizes is None:
        return (
            f"memory a rank: as miras-train --dry-run says, which reads {run.data.tokenizer}; or give model.vocab_size"
        )
    need = gib(sizes.rank_bytes)
    weights, states, logits = gib(sizes.weights_bytes), gib(sizes.saved_state_bytes), gib(sizes.logits_bytes)
    return (
        f"memory a rank: at least {need:.2f} GiB (weights, gradients, AdamW {weights:.2f}; saved states {states:.2f}; "
        f"logits {logits:.2f}), activations on top; {sizes.parameters:,} parameters"
    ) + ("" if gpu_gib is None or need <= gpu_gib else _too_much(gpu_gib))


def _too_much(gpu_gib: float) -> str:
    return (
        f"\nnote: that is more than the {gpu_gib:g} GiB of a device (gpu_gib); share the model (parallel.tensor, "
        f".pipeline), its rows (parallel.context, .pieces) or the optimizer (optimizer.distributed)"
    )


def rank_sizes(run: Run, world_size: int) -> Sizes | None:
    """The sizes of a run whose layout is decided as training would; None where the vocabulary isn't known here."""
    vocabulary = run.model.vocab_size or (BYTES_VOCABULARY if run.data.tokenizer == "bytes" else None)
    if vocabulary is None:
        return None
    pieces = decide_layout(run).pieces
    return sizes_of(replace(run, parallel=replace(run.parallel, pieces=pieces)), vocabulary, world_size)


def gib(count: float) -> float:
    """Bytes as GiB."""
    return count / 2**30
