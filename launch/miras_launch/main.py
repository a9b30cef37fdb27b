"""miras-launch CONFIG --ranks N [--section.field=value ...] [--dry-run]: check a run for N ranks, then start them.

What torchrun would find out on every rank (a layout that does not divide, a batch that does not split) is said
here once, before a process starts. Several machines: the same line on each, with --nodes, --node-rank and
--rendezvous HOST:PORT of the first.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from miras_megatron.config.check import check_run
from miras_megatron.config.errors import ConfigError
from miras_megatron.config.load import parse_command_line
from miras_megatron.config.schema import Run
from miras_megatron.config.sizes import sizes_of

SWITCHES = {"dry-run": "prints the layout, memory a rank and the command; starts nothing"}

BYTES_VOCABULARY = 257
"""ids of the tokenizer `bytes`"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns torchrun's exit code, or 2 for a configuration that can't run."""
    words = list(sys.argv[1:] if argv is None else argv)
    machines, rest = _machines().parse_known_args(words)
    about = f"{__doc__}\n{_machines().format_help()}"
    try:
        command = parse_command_line(rest, prog="miras-launch", description=about, switches=SWITCHES)
        world_size = machines.ranks * machines.nodes
        check_run(command.run, command.source, world_size)
    except ConfigError as error:
        print(f"miras-launch: {error}", file=sys.stderr)
        return 2
    line = torchrun_line(machines, [word for word in rest if word != "--dry-run"])
    told = [describe_layout(command.run, world_size), describe_memory(command.run, world_size), shlex.join(line)]
    print("\n".join(told), flush=True)
    return 0 if command.switches["dry-run"] else subprocess.run(line, check=False).returncode


def _machines() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=1, help="processes on this machine, one a device (default 1)")
    parser.add_argument("--nodes", type=int, default=1, help="machines (default 1)")
    parser.add_argument("--node-rank", type=int, default=0, help="which of them this is, from 0")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="where the machines meet; on the first one")
    return parser


def torchrun_line(machines: argparse.Namespace, words: Sequence[str]) -> list[str]:
    """The torchrun command that trains with `words` on these machines."""
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(machines.ranks)]
    if machines.nodes == 1 and machines.rendezvous is None:
        line += ["--standalone"]
    else:
        line += ["--nnodes", str(machines.nodes), "--node-rank", str(machines.node_rank)]
        line += ["--rdzv-backend", "c10d", "--rdzv-endpoint", machines.rendezvous or "localhost:29500"]
    beside = Path(sys.executable).with_name("miras-train")
    return [*line, "--no-python", str(beside) if beside.exists() else "miras-train", *words]


def describe_layout(run: Run, world_size: int) -> str:
    """One line: how the ranks share the work."""
    parallel = run.parallel
    return (
        f"{world_size} ranks = {run.data_ranks(world_size)} data x {parallel.tensor} tensor x "
        f"{parallel.pipeline} pipeline x {parallel.context} context; {run.training.global_batch} rows a step in "
        f"{run.micro_batches(world_size)} microbatches of {run.training.micro_batch} a rank"
    )


def describe_memory(run: Run, world_size: int) -> str:
    """One line: what a rank surely needs, where the vocabulary is known without reading a tokenizer."""
    vocabulary = run.model.vocab_size or (BYTES_VOCABULARY if run.data.tokenizer == "bytes" else None)
    if vocabulary is None:
        return (
            f"memory a rank: as miras-train --dry-run says, which reads {run.data.tokenizer}; or give model.vocab_size"
        )
    sizes = sizes_of(run, vocabulary, world_size)
    need, weights, states = (x / 2**30 for x in (sizes.rank_bytes, sizes.weights_bytes, sizes.saved_state_bytes))
    return (
        f"memory a rank: at least {need:.2f} GiB (weights, gradients, AdamW {weights:.2f}; saved states {states:.2f}), "
        f"activations on top; {sizes.parameters:,} parameters"
    )


if __name__ == "__main__":
    sys.exit(main())
