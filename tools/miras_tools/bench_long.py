"""miras-bench long: one exact step on rows of many lengths, in pieces of one length: peak memory and speed.

The peak is reckoned too, from a row of three pieces and what a token and a piece border take in closed form
(`config.sizes`): memory that grows otherwise with the row would show as a difference.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from miras_megatron.config.check import find_problems
from miras_megatron.config.load import load_run
from miras_megatron.config.schema import Run
from miras_megatron.config.sizes import borders_bytes, row_bytes

from .bench_ranks import Answer, started, usable_cores

MIB = 2.0**20
LENGTHS = (32768, 262144, 2097152)
TIMED = 98304
"""tokens, about, that are measured of a length: short rows several times, of which medians count"""
CHECKED = 65536
CHECKED_PIECES = 8
SAME_GRADIENT = 1e-9
MEASURED = ("parameters", "seconds", "cpu_seconds", "loss", "start_mib", "peak_mib")


def runs_of(path: str, lengths: Sequence[int], folder: str) -> list[Run]:
    """The run of the file `path` with other rows, in pieces of the length it has. Raises ValueError."""
    run = load_run([path])
    parallel, length = run.parallel, run.data.sequence_length
    if parallel.pieces == "auto":
        raise ValueError(f"{path}: parallel.pieces = auto: the benchmark needs a number, to keep the pieces' length")
    piece, rest = divmod(length, parallel.pieces * parallel.context)
    found = []
    for tokens in lengths:
        pieces, over = divmod(tokens, piece * parallel.context)
        if rest or over or pieces < 1:
            raise ValueError(f"{tokens} tokens are no multiple of {parallel.context} pieces of {piece}")
        found.append(
            replace(
                run,
                run=replace(run.run, dir=folder),
                parallel=replace(parallel, pieces=pieces),
                data=replace(run.data, sequence_length=tokens, cache=folder),
                training=replace(run.training, steps=1 << 20),
            )
        )
        problems = list(find_problems(found[-1], parallel.context))
        if problems:
            raise ValueError("; ".join(problems))
    return found


def measure_long(path: str, lengths: Sequence[int], say: Callable[[str], None]) -> dict[str, Any]:
    """The report: a row a length. A row of three pieces a rank, two of them replayed, is measured first."""
    with tempfile.TemporaryDirectory(prefix="miras-bench") as folder:
        first = runs_of(path, lengths[:1], folder)[0]
        assert first.parallel.pieces != "auto"
        least = 3 * first.data.sequence_length // first.parallel.pieces
        rows = [_measure(run, say) for run in runs_of(path, [least, *lengths], folder)]
    base, *found = rows
    return {
        "piece": least // 3 // first.parallel.context,
        "ranks": first.parallel.context,
        "base": base,
        "rows": [{**row, **_reckoned(base, row)} for row in found],
    }


def _measure(run: Run, say: Callable[[str], None]) -> dict[str, Any]:
    """The first step of one length, each time in processes of its own; of ranks the slowest and the largest."""
    tokens = run.data.sequence_length
    times, found = max(1, min(3, TIMED // tokens)), list[dict[str, Any]]()
    for turn in range(times):
        say(f"{tokens} tokens, {turn + 1} of {times}")
        with started([(run, usable_cores(run.parallel.context))]) as (group,):
            ready = group.ready()
            group.ask("step", number=1)
            both = [start | end for start, end in zip(ready, group.answers(), strict=True)]
        found.append({name: max(rank[name] for rank in both) for name in MEASURED})
    medians = {name: median(one[name] for one in found) for name in MEASURED}
    return {
        "tokens": tokens,
        "pieces": run.parallel.pieces,
        **medians,
        "tokens_per_s": tokens / medians["seconds"],
        "row_mib": row_bytes(run) / MIB,
        "borders_mib": borders_bytes(run) / MIB,
    }


def _reckoned(base: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """The peak as the shortest row's and the closed form have it, and what it is made of."""
    activations = base["peak_mib"] - base["start_mib"] - base["row_mib"] - base["borders_mib"]
    reckoned = base["start_mib"] + activations + row["row_mib"] + row["borders_mib"]
    return {"activations_mib": activations, "reckoned_mib": reckoned, "ratio": row["peak_mib"] / reckoned}


def check_gradients(path: str, tokens: int, pieces: int) -> Answer:
    """Largest relative differences of a row in `pieces` pieces from the same row in one go, float64."""
    with tempfile.TemporaryDirectory(prefix="miras-bench") as folder:
        run = load_run([path])
        run = replace(
            run,
            run=replace(run.run, dir=folder),
            parallel=replace(run.parallel, context=1, pieces=pieces),
            data=replace(run.data, sequence_length=tokens, cache=folder),
        )
        with started([(run, usable_cores(1))]) as (group,):
            group.ready()
            group.ask("compare")
            return group.answers()[0]


def long_table(report: dict[str, Any]) -> str:
    """The report in Markdown."""
    head = [
        "tokens",
        "pieces a rank",
        "s a step",
        "tokens/s",
        "peak MiB",
        "formula",
        "start",
        "one piece",
        "row",
        "borders",
    ]
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for row in report["rows"]:
        cells = [f"{row['tokens']:,}", str(row["pieces"]), f"{row['seconds']:.1f}", f"{row['tokens_per_s']:,.0f}"]
        cells += [f"{row['peak_mib']:,.0f}", f"{row['reckoned_mib']:,.0f} ({row['ratio']:.2f})"]
        base = report["base"]
        cells += [f"{base['start_mib']:,.0f}", f"{row['activations_mib']:,.0f}"]
        cells += [f"{row['row_mib']:,.0f}", f"{row['borders_mib']:,.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
