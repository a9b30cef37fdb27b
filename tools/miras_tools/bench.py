"""miras-bench: the speed of the inner loop beside the nearest published implementation's; what sharing and length cost.

`miras-bench memory` first checks that the fast scan equals the oracle, and reports nothing when it doesn't. Then it
measures forward plus backward, every measurement in a process of its own, ours and titans-pytorch's in turn, and
prints medians of what each round gave. The peer is optional: `pip install 'miras-megatron[bench]'`.

`miras-bench context` takes steps of two ranks that share a sequence, of one rank, and of two independent ranks with
half of it each, in turn, and reports nothing when the losses differ. `miras-bench long` takes a step on rows of 32K,
256K and 2M tokens in pieces of one length and compares peak memory with a closed form; `--check` compares gradients.

Exit code 0; 1 when the check fails or a measurement dies; 2 for a wrong argument; 143 after SIGTERM. `--json FILE`
writes what the table is made of; bench_report.py documents its fields.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from miras_megatron.training.stop import ended_by_sigterm

from .bench_cases import CHECK_LIMIT, Case, paired_cases, scan_cases
from .bench_context import context_cases, context_table, measure_case
from .bench_long import CHECKED, CHECKED_PIECES, LENGTHS, SAME_GRADIENT, check_gradients, long_table, measure_long
from .bench_report import machine, summarise, table

PEER, PEER_VERSION = "titans-pytorch", "0.5.5"
INSTALL = "pip install 'miras-megatron[bench]'"
DEADLINE = 1800.0
"""seconds a single measurement may take"""
CARRIES = ("relay", "heads", "scan")
LONG_RUN = "configs/runs/long_2m_cpu.yaml"


def main(argv: list[str] | None = None) -> int:
    """Run one of the benchmarks; see the module's docstring for the exit codes."""
    arguments = _parser().parse_args(argv)
    if arguments.json and not Path(arguments.json).absolute().parent.is_dir():
        print(f"miras-bench: --json {arguments.json}: no such folder; make it first", file=sys.stderr)
        return 2
    try:
        with ended_by_sigterm():
            return COMMANDS[arguments.command](arguments)
    except ValueError as error:
        print(f"miras-bench: {error}", file=sys.stderr)
        return 1


def memory(arguments: argparse.Namespace) -> int:
    """The scan of a memory: rows beside the peer, then rows of our rules alone."""
    error = _measure({"job": "check"}, arguments.threads)["largest_error"]
    print(
        f"fast scan against oracle, float64, reads and gradients: largest relative difference {error:.1e}", flush=True
    )
    if not error <= CHECK_LIMIT:
        raise ValueError(f"the fast scan differs from the oracle by more than {CHECK_LIMIT:.0e}: no speed is reported")
    peer = _peer_version()
    if peer is None:
        print(f"{PEER} is not installed, so its columns are missing; to have them: {INSTALL}", flush=True)
    elif peer != PEER_VERSION:
        print(f"{PEER} {peer} is installed; the table was made for {PEER_VERSION}", flush=True)
    cases = [case for case in paired_cases(arguments.quick) if peer or case.side == "layer"]
    cases += scan_cases(arguments.quick)
    found = _rounds(cases, arguments.repeats, arguments.threads)
    report = summarise(found, arguments.threads, peer, error)
    print(table(report), flush=True)
    return _write(arguments, report)


def context(arguments: argparse.Namespace) -> int:
    """Two ranks that share a sequence, in every way that fits."""
    tokens = arguments.tokens or (512 if arguments.quick else 131072)
    cases = context_cases(tokens, arguments.layers, arguments.hidden)
    with tempfile.TemporaryDirectory(prefix="miras-bench") as folder:
        rows = [measure_case(case, folder, arguments.repeats, _tell) for case in cases if case.carry in arguments.carry]
    report = {"format": 1, "machine": machine(1), "rows": rows}
    print(f"{_title(report)}, one thread a rank; medians of {arguments.repeats} rounds\n")
    print(context_table(rows), flush=True)
    for row in rows:
        print(f"{row['carry']}: losses differ by {row['loss_difference']:.1e} at most; {row['reason']}")
    return _write(arguments, report)


def long(arguments: argparse.Namespace) -> int:
    """Rows of many lengths in pieces of one length, or only the gradients of one."""
    if not Path(arguments.run).is_file():
        print(f"miras-bench: --run {arguments.run}: no such file; run it from the repository's root", file=sys.stderr)
        return 2
    if arguments.check:
        tokens = arguments.tokens[0] if arguments.tokens else CHECKED
        found = check_gradients(arguments.run, tokens, CHECKED_PIECES)
        print(
            f"{tokens} tokens in {CHECKED_PIECES} pieces beside the same row in one go, float64: losses differ by "
            f"{found['loss_difference']:.1e}, gradients of {found['compared']} parameters by "
            f"{found['gradient_difference']:.1e} at most, relative to each one's largest"
        )
        if not found["gradient_difference"] <= SAME_GRADIENT:
            raise ValueError(f"gradients in pieces differ by more than {SAME_GRADIENT:.0e}")
        return _write(arguments, {"format": 1, "machine": machine(1), "tokens": tokens, **found})
    report = {"format": 1, "machine": machine(1), **measure_long(arguments.run, arguments.tokens or LENGTHS, _tell)}
    print(f"{_title(report)}; {report['ranks']} rank(s) of one thread, pieces of {report['piece']:,} tokens\n")
    print(long_table(report), flush=True)
    return _write(arguments, report)


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {"memory": memory, "context": context, "long": long}


def _tell(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


def _title(report: dict[str, Any]) -> str:
    where = report["machine"]
    return f"{where['cores']} cores of an {where['processor']}, no GPU, torch {where['torch']}"


def _write(arguments: argparse.Namespace, report: dict[str, Any]) -> int:
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _rounds(cases: list[Case], repeats: int, threads: int) -> list[tuple[Case, list[dict[str, Any]]]]:
    """Every case once a round, in turn, every second round backwards, so that drift falls on all alike."""
    found: list[list[dict[str, Any]]] = [[] for _ in cases]
    for turn in range(repeats):
        order = range(len(cases)) if turn % 2 == 0 else range(len(cases) - 1, -1, -1)
        for k in order:
            print(f"  round {turn + 1} of {repeats}: {cases[k].title()}", file=sys.stderr, flush=True)
            found[k].append(_measure({"job": "measure", "case": asdict(cases[k])}, threads))
    return list(zip(cases, found, strict=True))


def _measure(job: dict[str, Any], threads: int) -> dict[str, Any]:
    """One job in a fresh process."""
    environment = dict(os.environ, OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
    command = [sys.executable, "-m", "miras_tools.bench_worker", json.dumps({**job, "threads": threads})]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        raise ValueError(f"{job} took more than {DEADLINE:.0f} s; give --quick, or stop what else runs here") from None
    if done.returncode != 0:
        raise ValueError(f"{job} failed with code {done.returncode}:\n{done.stderr.strip()}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _peer_version() -> str | None:
    try:
        return metadata.version(PEER)
    except metadata.PackageNotFoundError:
        return None


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="miras-bench", description="Speed and memory, measured.")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("memory", help=f"the scan of a memory, beside {PEER} {PEER_VERSION}")
    two = commands.add_parser(
        "context", help="two ranks that share a sequence, beside one rank and an independent pair"
    )
    three = commands.add_parser("long", help="one exact step on rows of 32K, 256K and 2M tokens: peak memory and speed")
    for command in (one, two, three):
        command.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    for command in (one, two):
        command.add_argument("--repeats", type=_positive, default=3, metavar="N", help="rounds; medians are shown (3)")
        command.add_argument("--quick", action="store_true", help="small shapes: shows that it runs, no more")
    one.add_argument("--threads", type=_positive, default=1, metavar="N", help="threads of every process (1)")
    two.add_argument("--tokens", type=_positive, metavar="N", help="of the sequence (131072)")
    two.add_argument("--layers", type=_positive, default=4, metavar="N", help="of the model (4)")
    two.add_argument("--hidden", type=_positive, default=64, metavar="N", help="its width, channels (64)")
    two.add_argument("--carry", nargs="+", choices=CARRIES, default=CARRIES, help="ways of sharing to measure (all)")
    three.add_argument("--run", metavar="FILE", default=LONG_RUN, help=f"the run whose rows are changed ({LONG_RUN})")
    three.add_argument(
        "--tokens", type=_positive, nargs="+", metavar="N", help="lengths of rows (32768 262144 2097152)"
    )
    three.add_argument("--check", action="store_true", help="only compare gradients in pieces with the unsplit row's")
    return parser


if __name__ == "__main__":
    sys.exit(main())
