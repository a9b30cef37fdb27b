"""The exit code of the first cause, in a file: launchers tell the highest of all ranks, that of a signal, or their own.

A rank that ends for something to mend writes its code there before it leaves; those that lose it then end with 4.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

VARIABLE = "MIRAS_EXIT_CODE"
"""names the file; whoever starts ranks sets it"""


def tell_exit_code(code: int) -> int:
    """Write `code` where no other rank has written before; returns it. Nothing where there is no such file to write."""
    if VARIABLE in os.environ:
        path = Path(os.environ[VARIABLE])
        with suppress(OSError):  # the code goes with the process too
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "x", encoding="utf-8") as file:
                file.write(f"{code}\n")
    return code


def told_exit_code(path: Path) -> int | None:
    """What a rank wrote to `path`; None: nothing."""
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
