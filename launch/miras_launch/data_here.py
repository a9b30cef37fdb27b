"""Whether a run's data is where it says, before it waits in a queue: as far as this machine sees what ranks will."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from miras_megatron.config.schema import Data
from miras_megatron.config.token_pair import find_prefix

from .cluster import Cluster
from .points import Point

OWN_DISKS = ("/tmp", "/var/tmp", "/dev/shm")
"""Folders that every machine has for itself."""

MAYBE = "as this machine sees it; the ranks' may have it"


def missing_data(points: Sequence[Point], cluster: Cluster) -> tuple[list[str], list[str]]:
    """What the runs that aren't through won't find, each once: on any machine, and as far as this one can tell."""
    surely: dict[str, None] = {}
    perhaps: dict[str, None] = {}
    for point in points:
        for path, said in _missing(point.run.data) if not point.finished else ():
            if _is_ranks_too(path, cluster):
                surely[said] = None
            else:
                perhaps[f"{said} ({MAYBE})"] = None
    return list(surely), list(perhaps)


def _missing(data: Data) -> Iterator[tuple[str, str]]:
    """(path, what is said of it) of what isn't there."""
    for field, blend in (("data.train", data.train_blend), ("data.validation", data.validation_blend or [])):
        for _, prefix in blend:
            try:
                if prefix != "shipped":
                    find_prefix(prefix, field)
            except (ValueError, OSError) as error:
                yield prefix, str(error)
    name = data.tokenizer
    if name != "bytes" and not os.path.exists(os.path.join(name, "tokenizer.json") if os.path.isdir(name) else name):
        way_out = 'give "bytes", a tokenizer.json, or a folder that holds one'
        yield name, f"data.tokenizer = {name!r}: there is no such file; {way_out}"


def _is_ranks_too(path: str, cluster: Cluster) -> bool:
    """Whether the ranks see there what this machine sees.

    Not inside an image, nor on a disk that each machine has for itself, nor where this machine has no such disk at all.
    A relative path is beside run.dir, which all machines share.
    """
    if cluster.container is not None or cluster.wrapper:
        return False
    if cluster.launcher == "torchrun" or not os.path.isabs(path):
        return True
    whole = Path(os.path.normpath(path))
    own = [*OWN_DISKS, *_disk_of(cluster.cache)]
    return Path(*whole.parts[:2]).exists() and not any(whole.is_relative_to(folder) for folder in own)


def _disk_of(cache: str | None) -> list[str]:
    """The folder that holds the cluster's cache, as far as its name says it before the first variable."""
    folder = os.path.dirname((cache or "").partition("$")[0])
    return [folder] if folder not in ("", "/") else []
