"""miras-train CONFIG [--section.field=value ..] [--resume auto|never|PATH] [--init-from PATH] [--dry-run]

Several ranks: torchrun --nproc-per-node N --no-python miras-train CONFIG. Exit codes: 0 done, or saved after
SIGTERM or SIGUSR1; 2 something to mend in configuration, data or checkpoint; 3 stopped by the number guard;
4 another rank was lost, or a step hung (training.watchdog).
"""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper

from ..config.check import check_run
from ..config.errors import ConfigError
from ..config.load import parse_command_line
from ..config.schema import Run
from ..config.unread import printed, quiet_when_unread
from ..parallel.exit_code import tell_exit_code
from ..parallel.rendezvous import RankInfo, find_rank
from .stop import ended_by_sigterm

SHORT = {"resume": "checkpoint.resume", "init-from": "training.init_from", "init_from": "training.init_from"}
"""Short names of fields on the command line."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says where a disk takes no more: of records, since a save says so itself."""

SWITCHES = {"dry-run": "check the configuration and print sizes, memory a rank and tokens a step; trains nothing"}


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code; only a fault of this program gives a traceback.

    Of a wrong configuration one rank a machine speaks, since all would say the same (a file may be missing on one).
    """
    words = expand_short(list(sys.argv[1:] if argv is None else argv))
    here = RankInfo()
    try:
        here = find_rank()
        rank = here.rank
        command = parse_command_line(words, prog="miras-train", description=__doc__ or "", switches=SWITCHES)
        logging.basicConfig(level=logging.WARNING, format=f"rank {rank}: %(levelname)s: %(message)s")
        # Newer cores warn that they keep the common state elsewhere; ours is kept apart on purpose.
        logging.getLogger("megatron.core.dist_checkpointing").setLevel(logging.ERROR)
        if command.switches["dry-run"]:
            from .dry_run import describe_run

            # Alone, a layout of several ranks is sized for the fewest that have it; nothing is started for that.
            ranks = max(1, command.run.parallel.model_ranks) if here.launcher == "none" else here.world_size
            return printed(describe_run(command.run, command.source, ranks))
        check_run(command.run, command.source, here.world_size)
        if here.rank == 0 and sys.stderr.isatty():
            print("loading PyTorch and megatron-core: some seconds", file=sys.stderr, flush=True)
        return run_training(command.run, command.source)
    except KeyboardInterrupt:
        print("miras-train: Ctrl-C: ends without saving (SIGTERM saves after the step)", file=sys.stderr, flush=True)
        return 130
    except (ValueError, TimeoutError) as error:
        if not said_by_us(error):
            raise
        if not isinstance(error, ConfigError) or here.local_rank == 0:
            complain(error, here.rank)
        return tell_exit_code(2)


def run_training(run: Run, source: str) -> int:
    """Train; the number guard's stop is an exit code of its own."""
    from ..parallel.lost import RankLost
    from .guard import BadStep, NotANumber
    from .loop import train

    try:
        return train(run, source)
    except BadStep as stopped:
        kind = "not a number: " if isinstance(stopped, NotANumber) else ""
        print(f"miras-train: {kind}{stopped}", file=sys.stderr, flush=True)
        return tell_exit_code(3)
    except RankLost as lost:
        print(f"miras-train: {lost}", file=sys.stderr, flush=True)
        return 4
    except OSError as error:
        if error.errno not in FULL:
            raise
        way_out = "make room there, and run again to go on from the latest checkpoint"
        print(f"miras-train: run.dir = {run.run.dir}: {error.strerror}; {way_out}", file=sys.stderr, flush=True)
        return 2


def one_message(name: str, work: Callable[[], int]) -> int:
    """What `work` of the command `name` returns; 2 for something to mend, said in one message, and 130 for Ctrl-C.

    SIGTERM ends it as an exception does, with 143; a reader of its output that leaves, such as head, with 141 and no
    word. Characters that the terminal doesn't have are printed as escapes.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # or a folder's name ends what has just written the folder
    try:
        with ended_by_sigterm():
            return quiet_when_unread(work)
    except ValueError as error:
        if not said_by_us(error):
            raise
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        return 2
    except OSError as error:
        place = "" if error.filename is None else f"{error.filename}: "
        print(f"{name}: {place}{error.strerror or error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        return 130


def said_by_us(error: BaseException) -> bool:
    """Whether one of our packages raised `error`, so that it speaks to the user; a library's ValueError doesn't."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith("miras_")


def complain(error: Exception, rank: int) -> int:
    """One message, no traceback."""
    prefix = f"miras-train: rank {rank}: " if rank else "miras-train: "
    print(prefix + str(error), file=sys.stderr, flush=True)
    return 2


def expand_short(words: list[str]) -> list[str]:
    """`--resume X` and `--resume=X` as `--checkpoint.resume=X`; the same for the other short names."""
    result: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and name in SHORT and (equals or rest):
            result.append(f"--{SHORT[name]}={value if equals else rest.pop(0)}")
        else:
            result.append(word)
    return result


if __name__ == "__main__":
    raise SystemExit(main())
