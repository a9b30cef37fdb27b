"""miras-train --dry-run: everything that can be told of a run without training, and without a device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..config.check import check_run, find_warnings
from ..config.schema import Run
from ..config.sizes import sizes_of
from ..parallel.layout import decide_layout, layout_warnings
from .tokenizer import with_vocabulary


def describe_run(run: Run, source: str, world_size: int = 1) -> str:
    """Sizes of `run` on `world_size` ranks. Raises ConfigError with every problem, ValueError for a tokenizer."""
    check_run(run, source, world_size)
    vocabulary, unread = _vocabulary(run)
    parallel, layout = run.parallel, decide_layout(run)
    sizes = sizes_of(replace(run, parallel=replace(parallel, pieces=layout.pieces)), vocabulary, world_size)
    operations = sizes.flops_per_token
    rows = {
        "run": f"{run.run.title} ({source}), would lie in {run.run.dir}",
        "layers": f"{run.model.letters}, hidden {run.model.hidden}, {run.model.heads} heads, MLP {run.model.ffn_width}",
        "vocabulary": f"{vocabulary:,} tokens, {run.model.padded_vocab(vocabulary):,} rows",
        "parameters": f"{sizes.parameters:,}, of which embedding {sizes.embedding_parameters:,}",
        "state": f"{_bytes(sizes.state_bytes)} a sequence, whatever its length{_cache(run)}",
        "ranks": (
            f"{world_size} = {run.data_ranks(world_size)} data x {parallel.tensor} tensor "
            f"x {parallel.pipeline} pipeline x {parallel.context} context"
        ),
        "sequences": layout.reason,
        "memory a rank": (
            f"at least {_bytes(sizes.rank_bytes)}: weights, gradients, AdamW {_bytes(sizes.weights_bytes)}, "
            f"saved states {_bytes(sizes.saved_state_bytes)}, logits {_bytes(sizes.logits_bytes)}; activations on top"
        ),
        "tokens a step": (
            f"{sizes.tokens_per_step:,} = {run.training.global_batch} rows x {run.data.sequence_length}, "
            f"{run.micro_batches(world_size)} microbatch(es) of {run.training.micro_batch} a rank"
        ),
        "tokens in all": f"{sizes.tokens_per_step * run.training.steps:,} in {run.training.steps:,} steps",
        "operations": f"{operations:.3g} a token, {operations * sizes.tokens_per_step:.3g} a step",
    }
    notes = [f"note: {warning}" for warning in (*find_warnings(run), *layout_warnings(run))]
    return "\n".join([*(f"{name + ':':<15}{text}" for name, text in rows.items()), *notes, *unread])


def _vocabulary(run: Run) -> tuple[int, list[str]]:
    """The model's tokens, and a note where model.vocab_size had to be believed: a login node may lack the tokenizer."""
    given, name = run.model.vocab_size, run.data.tokenizer
    if given is not None and name != "bytes" and not Path(name).exists():
        return given, [f"note: data.tokenizer = {name!r}: not here, so model.vocab_size = {given} is believed"]
    fitting = with_vocabulary(run).model.vocab_size
    assert fitting is not None
    return fitting, []


def _cache(run: Run) -> str:
    return "; full attention's cache grows on top of it" if "a" in run.model.letters else ""


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
