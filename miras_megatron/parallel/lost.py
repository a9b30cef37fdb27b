"""What it looks like that another rank is gone, and how all ranks tell the same first cause of it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


class RankLost(RuntimeError):
    """Another rank died, hangs, or did not come in time; the message says who waited for whom, and where."""


GONE = ("onnection", "imed out", "imeout", "closed by", "roken pipe", "eset by peer", "NCCL")
"""What torch's errors say where a rank of a collective died or hung."""

WAITING = ("torch.distributed", "megatron.core.", "miras_megatron.parallel.")
"""Modules in which ranks wait for each other: core for what stages send and for its buckets, ours for parts."""


def as_loss(error: BaseException, where: str) -> RankLost | None:
    """What to raise for an `error` of torch's collectives that means another rank is gone; None: it means no such.

    where  this rank, for an error that names none
    """
    said = None if isinstance(error, RankLost) else _said_of_loss(error)
    return None if said is None else RankLost(with_first_cause(f"{where} lost another rank in a collective: {said}"))


def _said_of_loss(error: BaseException) -> str | None:
    """What an error says that means another rank is gone; None: it means no such."""
    if not isinstance(error, RuntimeError):
        return None
    said = (str(error).splitlines() or [""])[0][:200]
    if isinstance(error, RankLost):
        return said
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    return said if module.startswith(WAITING) and any(word in said for word in GONE) else None


def with_first_cause(own: str) -> str:
    """`own`, and what the first rank that failed said, where that was another."""
    first = tell_cause(own)
    return own + (f"\nfirst cause: {first}" if first != own else "")


def tell_cause(own: str) -> str:
    """Tell all ranks `own` where it is the first cause; returns the first. `own` where nobody can be asked."""
    try:
        store: Any = dist.distributed_c10d._get_default_store()
        return str(store.compare_set("first_cause", "", own).decode())
    except Exception:
        return own
