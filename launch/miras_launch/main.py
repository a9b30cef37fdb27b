"""miras-launch CONFIG [--cluster NAME] [--nodes N] [--ranks N] [--sweep field=a,b,c ..] [--section.field=value ..]

Check a run for the ranks of a cluster, then start them: by torchrun on this machine (without --cluster), by Slurm's
sbatch, or by mpirun. What every rank would find out (a layout that does not divide, a batch that does not split) is
said here once, before a process starts; it needs no torch, so a login node will do. docs/launch.md tells the rest.

--dry-run prints layout, memory a rank and the script or command. Exit codes: 0 submitted, or trained; 2 something to
mend in configuration, cluster file, data or what Slurm was asked for; 3 stopped by the number guard; 6 the preflight
found machines at fault; else that of torchrun (1 whatever happened) or mpirun.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from miras_megatron.config.errors import ConfigError
from miras_megatron.config.unread import quiet_when_unread

PACKAGES = {"yaml": "PyYAML", "jsonargparse": "jsonargparse"}
"""Module -> the package that has it: all that this command needs beside Python."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see above for what it returns."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        from .command import launch  # here, so that a login node without its packages is told their names

        return quiet_when_unread(lambda: launch(words, __doc__ or ""))
    except ConfigError as error:
        print(f"miras-launch: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES:
            raise
        package = PACKAGES[error.name]
        print(f"miras-launch: {package} isn't installed here: pip install pyyaml jsonargparse", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
