"""Where a thread stands, read off its frames from outside: its stack, and the wait for other ranks that it is in."""

from __future__ import annotations

import linecache
import sys
import threading
import traceback
from collections.abc import Collection, Iterator
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVES = ("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger")
TOGETHER = "miras_megatron.parallel.together"
"""Its collectives are waited for on CUDA where their result is read."""

WAITING = ("megatron.", "deepspeed.", "miras_megatron.parallel.")
"""Packages that start a collective and wait for it later, in a line that says `wait(`."""

ON_GPU = "what its GPU was given to do"
"""How the wait of a rank is told whose GPU is busy: with a kernel, or with a collective of a group that isn't known."""

MOST_FRAMES = 80
"""of a stack that is told, the innermost"""


def main_thread_frame() -> FrameType:
    """The innermost frame of this process's main thread."""
    ident = threading.main_thread().ident
    assert ident is not None
    return sys._current_frames()[ident]


def describe_stacks(but: Collection[str] = ()) -> str:
    """The stacks of this process's threads but those named `but`: the main thread's first, innermost frames last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    parts = []
    for ident, frame in frames:
        if names.get(ident) not in but:
            title = "main thread" if ident == main else f"thread {names.get(ident, ident)}"
            parts.append(f"{title}:\n" + "".join(traceback.format_stack(frame)[-MOST_FRAMES:]).rstrip())
    return "\n".join(parts)


def describe_wait(frame: FrameType) -> str | None:
    """The wait for other ranks that `frame`, the innermost of its thread, stands in; None where it does something else.

    "all_reduce among ranks 0, 1 (TENSOR_MODEL_PARALLEL_GROUP), called by any_rank (together.py:29)"
    """
    module = _module(frame)
    if module == "miras_megatron.parallel.mesh" and frame.f_code.co_name == "barrier":
        return f"the barrier at: {frame.f_locals.get('what')}"
    if module == "miras_megatron.parallel.exchange":
        return _packet(frame)
    if module == TOGETHER or (module.startswith(WAITING) and "wait(" in _line(frame)):
        return f"{frame.f_code.co_name}{_group(frame)}{_caller(frame)}"
    calls = takewhile(lambda f: _module(f) in COLLECTIVES, _outward(frame))
    named = [f for f in calls if f.f_code.co_name != "wrapper"]
    if not named:
        return None
    name = getattr(named[-1].f_locals.get("op0"), "__name__", named[-1].f_code.co_name)  # several sent as one
    return f"{name}{_group(named[-1])}{_caller(named[-1])}"


def describe_device_wait(frame: FrameType, device: torch.device) -> str | None:
    """The wait for a GPU that hasn't done all it was given; None where it has, or where there is none.

    The thread may stand in any line then that asks for a result: a collective on a GPU has no frame.
    """
    try:
        if device.type != "cuda" or torch.cuda.default_stream(device).query():
            return None
    except RuntimeError as error:  # an error of a kernel's comes with whatever is asked next
        return f"a GPU that fails ({(str(error).splitlines() or [''])[0]}), at {describe_place(frame)}"
    return f"{ON_GPU}, at {describe_place(frame)}"


def describe_place(frame: FrameType) -> str:
    """The innermost frame of ours, or `frame` itself: "train_step (step.py:47)"."""
    return next((_short(f) for f in _outward(frame) if _module(f).startswith("miras_")), _short(frame))


def _packet(frame: FrameType) -> str | None:
    """A wait for a neighbour's packet."""
    for inner in _outward(frame):
        ring: Any = inner.f_locals.get("self")
        key: Any = inner.f_locals.get("key")
        if _module(inner) != "miras_megatron.parallel.exchange":
            return None
        if hasattr(ring, "ranks") and key is not None and inner.f_code.co_name in ("receive", "_settle"):
            got, direction = inner.f_code.co_name == "receive", inner.f_locals.get("direction")
            what = "state" if direction == "right" else "state's gradient"
            step = 1 if (direction == "right") != got else -1
            peer = ring.ranks[(ring.index + step) % ring.size]
            way = f"from rank {peer}" if got else f"to be taken by rank {peer}"
            return f"the {what} of layer {key.layer}, piece {key.piece}, {way}"
    return None


def _group(frame: FrameType) -> str:
    """Which ranks a collective is among, where that can be seen."""
    values = frame.f_locals
    owners = (values.get("self"), values.get("ctx"))
    groups = (values.get("group"), *(getattr(o, name, None) for o in owners for name in ("pp_group", "tp_group")))
    group: Any = next((group for group in groups if group is not None), None)
    if group is None and _module(frame) not in COLLECTIVES:
        return ""
    try:
        ranks = dist.get_process_group_ranks(group)
    except Exception:  # the group may be on its way out: this is another thread's
        return ""
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    name = getattr(group, "group_desc", "undefined")
    return f" among ranks {shown}" + (f" ({name})" if name != "undefined" else "")


def _caller(frame: FrameType) -> str:
    own = next((f for f in _outward(frame.f_back) if _module(f).startswith("miras_")), None)
    return "" if own is None else f", called by {_short(own)}"


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _short(frame: FrameType) -> str:
    return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def _line(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
