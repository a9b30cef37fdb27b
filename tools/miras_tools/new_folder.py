"""A folder that is there whole or not at all: written beside its place, and renamed when complete.

An empty folder that is there already may be one that can't be replaced (a mount point, a link, where a shell stands):
it is written in a hidden folder inside, and its files are moved up when complete, what tells what they are at the end.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def refuse_occupied(target: Path, field: str, own: Path | None = None) -> None:
    """Raise ValueError where `target`, which the user named as `field`, holds something already, `own` aside."""
    if "\0" in str(target):
        raise ValueError(
            f"{field} = {str(target)!r}: holds a NUL byte, which no name of a file may; name another folder"
        )
    held = min((path.name for path in target.iterdir() if path != own), default=None) if target.is_dir() else None
    if held is not None:
        raise ValueError(
            f"{field} = {target}: is not empty (it holds {held!r}); name a new folder, or remove that one yourself"
        )
    if target.exists() and not target.is_dir():
        raise ValueError(f"{field} = {target}: is a file; name a new folder")
    if target.is_symlink() and not target.exists():
        raise ValueError(f"{field} = {target}: is a link to a folder that isn't there; make that one, or name another")


def refuse_small_disk(target: Path, field: str, needed: int) -> None:
    """Raise ValueError where the disk of `target` has less than `needed` bytes left."""
    place = next(folder for folder in (target.absolute(), *target.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise ValueError(f"{field} = {target}: needs {needed >> 20} MiB, {free >> 20} MiB are free there; make room")


@contextmanager
def new_folder(target: Path, field: str, last: str) -> Iterator[Path]:
    """A folder to fill, called `target` when the block ends well and gone when it doesn't, whatever ended it.

    last   the name in it without which nothing there is read as one: what is killed while files are moved up lacks it
    Raises ValueError where `target` holds something, or the disk doesn't take what is written.
    """
    refuse_occupied(target, field)
    waits = target.is_dir()
    place = target if waits else target.absolute().parent
    try:
        place.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{_short(target.name)}.", suffix=".part", dir=place))
    except OSError as error:
        raise _refused(target, field, error) from None
    try:
        if waits:
            refuse_occupied(target, field, own=part)  # two that found it empty at once would mix their files
        yield part
        if waits:
            _move_up(part, last)
        else:
            part.chmod(0o777 & ~_umask())
            os.rename(part, target)
    except OSError as error:
        raise _refused(target, field, error) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _move_up(part: Path, last: str) -> None:
    """Move what is in `part` into the folder around it, `last` at the end; all back where one doesn't go."""
    paths = sorted(part.iterdir(), key=lambda path: (path.name == last, path.name))
    try:
        for path in paths:
            os.rename(path, part.parent / path.name)
    except BaseException:
        for path in paths:
            if not path.exists():
                os.rename(part.parent / path.name, path)
        raise


def _short(name: str) -> str:
    """As much of `name` as leaves room for a prefix and a suffix in the 255 bytes of a file's name."""
    return os.fsencode(name)[:200].decode(errors="ignore")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _refused(target: Path, field: str, error: OSError) -> ValueError:
    reason = error.strerror or error
    return ValueError(f"{field} = {target}: can't be written ({reason}); make room there, or name another folder")
