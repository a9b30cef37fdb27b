"""Text files that a kill or a full disk leaves whole: the old one or the new one."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Give `path` this text in one step: readers see the old file or the new one, never half of it."""
    os.replace(write_beside(path, text), path)


def write_beside(path: Path, text: str) -> Path:
    """A file beside `path` with this text, down to the disk: moved onto `path` it needs no more room."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(scratch, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return scratch
