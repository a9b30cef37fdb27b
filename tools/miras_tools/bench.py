"""miras-bench: how fast the inner loop is, measured beside the nearest published implementation.

`miras-bench memory` first checks that the fast scan equals the oracle, and reports nothing when it doesn't. Then it
measures forward plus backward, every measurement in a process of its own, ours and titans-pytorch's in turn, and
prints medians of what each round gave. The peer is optional: `pip install 'miras-megatron[bench]'`.

Exit code 0; 1 when the check fails or a measurement dies; 2 for a wrong argument. `--json FILE` writes what the table
is made of; bench_report.py documents its fields.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from .bench_cases import CHECK_LIMIT, Case, paired_cases, scan_cases
from .bench_report import summarise, table

PEER, PEER_VERSION = "titans-pytorch", "0.5.5"
INSTALL = "pip install 'miras-megatron[bench]'"
DEADLINE = 1800.0
"""seconds a single measurement may take"""


def main(argv: list[str] | None = None) -> int:
    """Run one of the benchmarks; see the module's docstring for the exit codes."""
    arguments = _parser().parse_args(argv)
    if arguments.json and not Path(arguments.json).absolute().parent.is_dir():
        print(f"miras-bench: --json {arguments.json}: no such folder; make it first", file=sys.stderr)
        return 2
    try:
        return memory(arguments)
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
    parser = argparse.ArgumentParser(prog="miras-bench", description="Speed and memory of the inner loop, measured.")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("memory", help=f"the scan of a memory, beside {PEER} {PEER_VERSION}")
    one.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    one.add_argument("--repeats", type=_positive, default=3, metavar="N", help="rounds; medians are shown (3)")
    one.add_argument("--threads", type=_positive, default=1, metavar="N", help="threads of every process (1)")
    one.add_argument("--quick", action="store_true", help="small shapes: shows that it runs, says nothing about speed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
