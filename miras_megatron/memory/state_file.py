"""A memory state's tensors on disk: written whole or not at all, read only if they are those of a state."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

STATE_FORMAT = 1
MATRICES = ("weights", "momentum", "anchor")


def write_tensors(path: str | os.PathLike[str], tensors: dict[str, Tensor]) -> None:
    """Write the flat form of a state to `path`, whole or not at all."""
    part = f"{os.fspath(path)}.part"
    torch.save({"format": STATE_FORMAT, "tensors": tensors}, part)
    os.replace(part, path)


def read_tensors(path: str | os.PathLike[str], device: torch.device | str) -> dict[str, Tensor]:
    """The flat form of a state; nothing is unpickled but tensors. Raises ValueError where the file holds no state."""
    named = os.fspath(path)
    try:
        stored = torch.load(path, map_location=device, weights_only=True)
    except OSError:
        raise
    except Exception as error:  # bytes of something else may raise anything, KeyError and IndexError included
        reason = "is empty" if os.path.getsize(path) == 0 else f"can't be read ({type(error).__name__})"
        raise ValueError(f"{named}: no memory state: the file {reason}") from None
    if not isinstance(stored, dict) or stored.get("format") != STATE_FORMAT:
        raise ValueError(f"{named}: not a memory state of format {STATE_FORMAT}")
    if problems := list(_problems(stored.get("tensors"))):
        raise ValueError(f"{named}: no memory state: {'; '.join(problems)}")
    flat: dict[str, Tensor] = stored["tensors"]
    return flat | {name: flat[name].cpu() for name in ("phase", "seen") if name in flat}


def _problems(flat: Any) -> Iterator[str]:
    """What of `flat` can't be the flat form of a state, whatever its rule."""
    if not isinstance(flat, dict) or not all(isinstance(x, Tensor) for x in flat.values()):
        yield "its tensors are no mapping from names to tensors"
        return
    found = {part: sum(str(name).startswith(f"{part}.") for name in flat) for part in MATRICES}
    wanted = {"phase", *(f"{part}.{i}" for part, count in found.items() for i in range(count or part == "weights"))}
    yield from (f"{name} is missing" for name in sorted(wanted - flat.keys()))
    known = {name for name in flat if isinstance(name, str) and name.startswith("tail.")} | wanted | {"seen"}
    yield from (f"{name!r} is no part of a state" for name in flat if name not in known)
    rows = flat["phase"].shape[:1] if "phase" in flat else torch.Size()
    for name, x in flat.items():
        count = name in ("phase", "seen")
        fits = x.dtype == torch.int64 and x.ndim == 1 if count else x.is_floating_point() and x.ndim == 4
        if name in known and (not fits or x.shape[: len(rows)] != rows):
            must = "int64 [B]" if count else "floating point [B, N, ...] of four dimensions"
            yield f"{name} is {x.dtype} {tuple(x.shape)}, must be {must}, with the rows of phase"
