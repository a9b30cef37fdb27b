"""Where the ranks of a preflight tell each other what they found: torch's store, and collectives with a deadline.

The only file here that imports torch, and only inside functions: a login node has none.
"""

from __future__ import annotations

import datetime
import json
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from miras_megatron.config.words import counted
from miras_megatron.parallel.rendezvous import RankInfo

from .node_facts import Facts


class Meeting:
    """A store of named values that all ranks see, each wait with a deadline.

    store   torch's: set, get, check
    """

    def __init__(self, store: Any, info: RankInfo, deadline: float) -> None:
        self.store, self.info, self.deadline = store, info, deadline

    @classmethod
    def join(cls, info: RankInfo, deadline: float) -> Meeting:
        """Meet at the place where training would. Raises RuntimeError of torch where it isn't there in time."""
        import torch.distributed as dist

        stores: Any = dist
        if info.world_size == 1:
            return cls(stores.HashStore(), info, deadline)
        tcp = stores.TCPStore(
            info.host,
            info.port,
            is_master=info.rank == 0 and not info.agent_keeps_store,
            timeout=datetime.timedelta(seconds=deadline),
            wait_for_workers=False,
        )
        return cls(stores.PrefixStore(f"doctor/{info.attempt}", tcp), info, deadline)

    def tell(self, what: str, value: object) -> None:
        """Say this rank's `what` to all."""
        self.store.set(f"{what}_{self.info.rank}", json.dumps(value))

    def hear(self, what: str, ranks: Sequence[int], deadlines: float = 1.0) -> dict[int, Any]:
        """What each of `ranks` says of `what`, as far as they say it within so many deadlines."""
        heard: dict[int, Any] = {}
        end = time.monotonic() + deadlines * self.deadline
        while len(heard) < len(ranks):
            missing = [rank for rank in ranks if rank not in heard]
            for rank in missing:
                if self.store.check([f"{what}_{rank}"]):
                    heard[rank] = json.loads(self.store.get(f"{what}_{rank}"))
            if time.monotonic() > end:
                break
            time.sleep(0.02)
        return heard

    def gather(self, what: str, value: object, ranks: Sequence[int]) -> dict[int, Any]:
        """Say `value`; what each of `ranks` says, as far as it came in time, alike on all that ask. Rank 0 must ask.

        It alone looks for everybody's: all for all would be a million looks a round at a thousand ranks.
        """
        self.tell(what, value)
        if self.info.rank == 0:
            self.tell(f"all_{what}", list(self.hear(what, ranks).items()))
        return {int(rank): said for rank, said in self.hear_first(f"all_{what}") or ()}

    def hear_first(self, what: str) -> Any:
        """What rank 0 says; None: nothing. It may have waited for others itself, so it gets three deadlines."""
        return self.hear(what, [0], deadlines=3.0).get(0)

    def hear_all(self, what: str) -> dict[int, Any]:
        """The same of every rank."""
        return self.hear(what, range(self.info.world_size))


def see_gpus(facts: Facts, *, local_rank: int, gpus: int, **_: object) -> None:
    """Devices that torch sees, and a product on this rank's own; where Triton is, the first rank has it compile."""
    import torch

    facts.gpus = torch.cuda.device_count()
    if not facts.gpus or local_rank >= facts.gpus:
        return
    facts.gpu = torch.cuda.get_device_name(local_rank)
    facts.versions["cuda of torch"] = str(torch.version.cuda)
    x = torch.eye(256, device=f"cuda:{local_rank}")
    if not torch.equal((2 * x) @ x, 2 * x):
        facts.faults.append(f"GPUs: cuda:{local_rank} computes a wrong product")
    if facts.first:
        see_triton(facts)


def see_triton(facts: Facts) -> None:
    """torch.compile, which makes a Triton kernel of this and runs it."""
    import torch

    x = torch.arange(1024, device="cuda", dtype=torch.float32)
    made = torch.compile(lambda x: x * 2 + 1)(x)
    if not torch.equal(made, x * 2 + 1):
        facts.faults.append("Triton: a compiled kernel computes wrong numbers")


def all_reduce(meeting: Meeting) -> str:
    """One sum over all ranks, by NCCL where there are GPUs, else by gloo; empty, or what went wrong on this rank."""
    import torch
    import torch.distributed as dist

    info, patience = meeting.info, datetime.timedelta(seconds=meeting.deadline)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    device = torch.device("cuda", info.local_rank) if backend == "nccl" else torch.device("cpu")
    stores: Any = dist
    try:
        dist.init_process_group(
            backend,
            store=stores.PrefixStore("world", meeting.store),
            rank=info.rank,
            world_size=info.world_size,
            timeout=patience,
        )
        total = torch.ones(1, device=device)
        work: Any = dist.all_reduce(total, async_op=True)
        end = time.monotonic() + meeting.deadline
        while not work.is_completed():
            if time.monotonic() > end:
                return f"{backend}: a sum over all ranks isn't there after {meeting.deadline:g} s"
            time.sleep(0.01)
        work.wait()
        if total.item() != info.world_size:
            return f"{backend}: a sum of 1 over {counted(info.world_size, 'rank')} gives {total.item():g}"
    except (RuntimeError, ValueError) as error:
        return f"{backend}: {(str(error).strip().splitlines() or [''])[0][:200]}"
    return ""


def own_address(info: RankInfo) -> str:
    """The address under which this machine goes to rank 0's: nothing is sent for that."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((info.host, info.port or 9))
            return str(probe.getsockname()[0])
        except OSError:
            return info.host


@contextmanager
def door(address: str) -> Iterator[int]:
    """A port on which others may connect to this machine; nobody answers, the system takes the call."""
    with socket.socket() as listening:
        listening.bind((address, 0))
        listening.listen(1024)
        yield int(listening.getsockname()[1])


def unreachable(doors: dict[str, tuple[str, int]], deadline: float) -> list[str]:
    """Machines whose door can't be reached from here."""
    missed = []
    for node, place in doors.items():
        try:
            socket.create_connection(place, timeout=min(deadline, 10.0)).close()
        except OSError:
            missed.append(node)
    return missed


def leave() -> None:
    """Take the group down where there is one."""
    with suppress(Exception):  # without torch, or after a lost rank, there is nothing to take down
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
