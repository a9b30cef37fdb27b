"""miras-bench context: two ranks that share a sequence beside one rank, and beside what the two cores allow at all.

Three groups live at once and take their steps in turn, round after round: one rank with the whole sequence on one core;
two independent ranks with half of it each, at the same time, on two cores; two ranks that share it. What the
independent pair gains over one rank is all that the machine has to give; the ratio to it is the efficiency of sharing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from miras_megatron.config.check import find_problems
from miras_megatron.config.schema import Checkpoint, Data, Logging, Memory, Model, Optimizer, Parallel, Run, RunFolder
from miras_megatron.config.schema import Training as Steps

from .bench_ranks import Answer, Ranks, started, usable_cores
from .bench_trace import calibrate, idle_of_trace, packet_sizes, simulated_idle

RANKS = 2
SAME_LOSS = 1e-4
"""relative; float32 sums in another order, and the differences that an update makes of them"""
GOAL = 0.93


@dataclass(frozen=True)
class ContextCase:
    """One way of sharing rows of `tokens` tokens. pieces: a rank's, None: as `auto` decides (relay)."""

    carry: str
    rule: str
    tokens: int
    layers: int = 4
    hidden: int = 64
    heads: int = 2

    def title(self) -> str:
        return f"{self.carry} {self.rule}, {self.tokens} tokens"


def context_cases(tokens: int, layers: int, hidden: int) -> list[ContextCase]:
    """The relay with a deep memory, and what else fits: heads for the same rule, scan for an affine one.

    heads and scan keep whole slices' graphs, so their rows are an eighth as long.
    """
    short = max(tokens // 8, 64 * RANKS)
    return [
        ContextCase("relay", "titans", tokens, layers, hidden),
        ContextCase("heads", "titans", short, layers, hidden),
        ContextCase("scan", "titans_linear", short, layers, hidden),
    ]


def run_of(case: ContextCase, folder: str, *, ranks: int, tokens: int, pieces: int | str) -> Run:
    """A job of `case`; pieces of a rank, "auto": as decided."""
    parallel = Parallel(context=ranks, carry=case.carry if ranks > 1 else "auto", pieces=pieces)  # type: ignore[arg-type]
    run = Run(
        run=RunFolder(dir=folder),
        model=Model(block="lmm", layers=case.layers, hidden=case.hidden, heads=case.heads),
        memory=Memory(rule=case.rule),
        parallel=parallel,
        data=Data(train="shipped", split="100,0,0", sequence_length=tokens, packing="plain"),
        training=Steps(steps=1 << 20, micro_batch=1, global_batch=1),
        optimizer=Optimizer(lr=1e-4, schedule="constant"),
        checkpoint=Checkpoint(every=0),
        logging=Logging(memory_every=0, tensorboard=False),
    )
    problems = list(find_problems(run, ranks))
    if problems:
        raise ValueError("; ".join(problems))
    return run


def measure_case(case: ContextCase, folder: str, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """One row of the report: medians over rounds of what `_round` measures."""
    cores = usable_cores(RANKS)
    shared = run_of(case, folder, ranks=RANKS, tokens=case.tokens, pieces="auto")
    with started([(shared, cores)]) as (both,):
        layout = both.ready()[0]
        pieces = layout["pieces"]
        replays = case.carry == "relay" and pieces > 1
        whole = run_of(case, folder, ranks=1, tokens=case.tokens, pieces=RANKS * pieces if replays else 1)
        half = run_of(case, folder, ranks=1, tokens=case.tokens // RANKS, pieces=pieces if replays else 1)
        with started([(whole, cores[:1]), *((half, [core]) for core in cores)]) as alone:
            for group in alone:
                group.ready()
            found = []
            for number in range(1, rounds + 2):
                say(f"round {number - 1} of {rounds}: {case.title()}" + (" (warms up)" if number == 1 else ""))
                found.append(_round(number, both, alone[0], alone[1:], replays))
            receive = _receive_seconds(both, found[0]["whole"][0]) if replays else 0.0
    return _row(case, layout, found[1:], replays, receive)


def _round(number: int, both: Ranks, whole: Ranks, halves: list[Ranks], trace: bool) -> dict[str, Any]:
    """Update `number` of all three; every second round the other way round. Raises ValueError where losses differ."""
    turns = {
        "whole": lambda: _step([whole], number, trace),
        "pair": lambda: _step(halves, number, False),
        "shared": lambda: _step([both], number, trace),
    }
    names = list(turns) if number % 2 else list(turns)[::-1]
    found = {name: turns[name]() for name in names}
    losses = found["whole"][0]["loss"], found["shared"][0]["loss"]
    if not abs(losses[0] - losses[1]) <= SAME_LOSS * abs(losses[0]):
        raise ValueError(f"step {number}: losses of one rank and of {RANKS} are {losses}: no speed is reported")
    return found


def _receive_seconds(both: Ranks, whole: Answer) -> float:
    """What one layer's packets at a border take their receiver once they are there, mean of the ranks."""
    both.ask("packets", sizes=packet_sizes(whole))
    return sum(sum(answer["seconds"]) for answer in both.answers()) / RANKS


def _step(groups: list[Ranks], number: int, trace: bool) -> list[Answer]:
    """The answers of all ranks of groups that take a step at the same time."""
    for group in groups:
        group.ask("step", number=number, trace=trace)
    return [answer for group in groups for answer in group.answers()]


def _seconds(answers: list[Answer]) -> float:
    return float(max(answer["seconds"] for answer in answers))


def _row(
    case: ContextCase, layout: Answer, rounds: list[dict[str, Any]], traced: bool, receive: float = 0.0
) -> dict[str, Any]:
    seconds = {name: [_seconds(one[name]) for one in rounds] for name in ("whole", "pair", "shared")}
    speed_ups = [a / b for a, b in zip(seconds["whole"], seconds["shared"], strict=True)]
    allowed = [a / b for a, b in zip(seconds["whole"], seconds["pair"], strict=True)]
    row: dict[str, Any] = {
        "carry": case.carry,
        "rule": case.rule,
        "tokens": case.tokens,
        "layers": case.layers,
        "heads": case.heads,
        "head_dim": case.hidden // case.heads,
        "pieces": layout["pieces"],
        "head_groups": layout["head_groups"],
        "reason": layout["reason"],
        **{f"{name}_seconds": median(values) for name, values in seconds.items()},
        "speed_up": median(speed_ups),
        "allowed": median(allowed),
        "of_allowed": median(a / b for a, b in zip(seconds["pair"], seconds["shared"], strict=True)),
        "loss_difference": max(abs(one["whole"][0]["loss"] - one["shared"][0]["loss"]) for one in rounds),
        "idle_of_step": None,
        "idle_traced": None,
        "idle_simulated": None,
    }
    if traced:
        row["idle_of_step"] = median(sum(one["shared"][0]["idle"]) / RANKS for one in rounds)
        row["idle_traced"] = median(idle_of_trace([answer["events"] for answer in one["shared"]]) for one in rounds)
        costs = [calibrate(one["whole"][0], case.layers, RANKS * layout["pieces"]) for one in rounds]
        shape = RANKS, case.layers, layout["pieces"]
        row["idle_simulated"] = median(simulated_idle(cost, *shape, receive) for cost in costs)
        row["receive_seconds"] = receive
        row["shares"] = costs[len(costs) // 2]
    return row


def context_table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown, as docs/context_parallel.md holds them."""
    head = ["carry", "rule", "tokens", "layers, heads", "pieces", "1 rank, s", "pair, s", "2 ranks, s"]
    head += ["speed-up", "of the pair's", "idle of step", "traced", "simulated"]
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for row in rows:
        cells = [
            row["carry"],
            row["rule"],
            f"{row['tokens']:,}",
            f"{row['layers']}, {row['heads']} x {row['head_dim']}",
        ]
        cells += [str(row["pieces"])]
        cells += [f"{row[name + '_seconds']:.2f}" for name in ("whole", "pair", "shared")]
        cells += [f"{row['speed_up']:.2f}", f"{row['of_allowed']:.3f}"]
        cells += [_percent(row[name]) for name in ("idle_of_step", "idle_traced", "idle_simulated")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"
