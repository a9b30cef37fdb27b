"""miras-doctor [--shared FOLDER] [--cache FOLDER] [--gpus N] [--free-gib X] [--clock S] [--deadline S]

Look at every machine before a run, and name those at fault: versions, GPUs, free disk, clocks, whether the run's folder
is one folder for all, whether Triton or a C compiler compile, and whether all ranks reach each other.

Start it as the run: srun miras-doctor, torchrun --nproc-per-node N --no-python miras-doctor, mpirun, or alone. Exit
code 0: nothing found; 1: machines at fault, told by rank 0; 2: a launcher's variables are wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress

from miras_megatron.parallel.exit_code import tell_exit_code
from miras_megatron.parallel.rendezvous import RankInfo, find_rank

from .examination import Examination
from .meeting import Meeting, leave
from .node_facts import node_name

FAULTS_FOUND = 6
"""What miras-launch ends with then: 1 would be a fault of the program, or of what starts ranks."""

MOST = 1_000_000_000
"""of devices, GiB and seconds"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see above for its exit codes."""
    wanted = _options().parse_args(argv)
    try:
        info = find_rank()
    except ValueError as error:
        print(f"miras-doctor: {error}", file=sys.stderr)
        return 2
    try:
        code = Examination(Meeting.join(info, wanted.deadline), wanted).run()
    except (RuntimeError, ImportError) as error:
        print(f"miras-doctor: {node_name()}: {_unmet(info, error)}", file=sys.stderr, flush=True)
        code = 1
    finally:
        leave()
    if code == 1:
        tell_exit_code(FAULTS_FOUND)
    return code


def _unmet(info: RankInfo, error: Exception) -> str:
    """What it means that torch, or the store in which ranks meet, isn't there any more or never was."""
    if isinstance(error, ImportError):
        return f"versions: torch can't be imported: {error}"
    said = (str(error).strip().splitlines() or [""])[0][:200]
    return f"network: rank {info.rank} can't meet the others, or lost them, at {info.host}:{info.port} ({said})"


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="miras-doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shared", metavar="FOLDER", help="must be one folder for all machines: run.dir")
    parser.add_argument("--cache", metavar="FOLDER", help="each machine's own: data.cache")
    parser.add_argument("--gpus", type=_count, default=0, help="devices that each machine must show (default 0)")
    parser.add_argument("--free-gib", type=_amount, default=1.0, help="space wanted in these folders, GiB (default 1)")
    parser.add_argument("--clock", type=_amount, default=5.0, help="seconds that clocks may differ (default 5)")
    parser.add_argument("--deadline", type=_amount, default=120.0, help="seconds that any step may take (default 120)")
    return parser


def _amount(text: str) -> float:
    """GiB or seconds. What is above MOST, and what is no number at all, is a slip of the pen."""
    with suppress(ValueError):
        if 0 <= (amount := float(text)) <= MOST:
            return amount
    raise argparse.ArgumentTypeError(f"{text!r} must be a number from 0 to {MOST:,}")


def _count(text: str) -> int:
    with suppress(ValueError):
        if 0 <= (count := int(text)) <= MOST:
            return count
    raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 0 to {MOST:,}")


if __name__ == "__main__":
    sys.exit(main())
