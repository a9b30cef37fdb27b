"""One run at a time compiles DeepSpeed's CPU AdamW on a machine.

torch keeps a lock beside what it compiles; a compilation that is killed leaves it, and all later ones wait for it
forever. So a run of ours holds a lock of the system's, which goes with its process, and leaves a note meanwhile:
where there is a note and nobody holds the lock, torch's is taken away.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from torch.utils.cpp_extension import get_default_build_root

NO_PROGRESS = 300.0
"""seconds without a file of another program's compilation that changes; a whole one takes one to two minutes"""

LONGEST = 1800.0
"""seconds that another run of ours may compile"""

PAUSE = 1.0
"""seconds between two looks"""


@contextmanager
def compiling_alone() -> Iterator[None]:
    """Inside, no other run of ours compiles, and no lock of a killed one is left. For one rank a machine.

    Raises ValueError where another compilation doesn't end.
    """
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    root.mkdir(parents=True, exist_ok=True)
    note = root / "miras_compiles_cpu_adam"
    with open(root / "miras_cpu_adam.lock", "a", encoding="utf-8") as held:
        _hold(held)
        for lock in root.glob("**/cpu_adam/lock"):
            if note.exists():
                lock.unlink(missing_ok=True)
            else:
                _wait_for(lock)
        note.touch()
        if not list(root.glob("**/cpu_adam/cpu_adam*.so")):
            print("compiling DeepSpeed's CPU AdamW: one or two minutes, once a machine", flush=True)
        yield
        note.unlink(missing_ok=True)


def _hold(file: IO[str]) -> None:
    began, said = time.monotonic(), False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not said:
                print("waiting for another run that compiles DeepSpeed's CPU AdamW", flush=True)
            if time.monotonic() - began > LONGEST:
                raise ValueError(
                    f"optimizer.offload = true: another run holds {file.name} for {LONGEST:.0f} s now, to compile "
                    "DeepSpeed's CPU AdamW; see what it does, and end it"
                ) from None
            said = True
            time.sleep(PAUSE)


def _wait_for(lock: Path) -> None:
    """Until another program's compilation is through."""
    print(f"waiting for another program to compile DeepSpeed's CPU AdamW ({lock})", flush=True)
    changed, since = 0.0, time.monotonic()
    while lock.exists():
        newest = _newest(lock.parent)
        if newest != changed:
            changed, since = newest, time.monotonic()
        if time.monotonic() - since > NO_PROGRESS:
            raise ValueError(
                f"optimizer.offload = true: nothing has changed beside {lock} for {NO_PROGRESS:.0f} s: most likely it "
                "was left by a compilation that was killed, and DeepSpeed would wait for it forever; if no program "
                "compiles, remove that file"
            )
        time.sleep(PAUSE)


def _newest(folder: Path) -> float:
    """When a file in `folder` last changed, by the file system's clock."""
    times = [0.0]
    for path in folder.iterdir():
        try:
            times.append(path.stat().st_mtime)
        except FileNotFoundError:  # it was there a moment ago
            continue
    return max(times)
