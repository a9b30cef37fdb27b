"""ParallelMesh: the process groups of a run, built once, and this rank's place among them.

The sole caller of megatron's parallel_state. World size 1 takes the same path, alone with itself.
"""

from __future__ import annotations

import datetime
import random
import time
from contextlib import suppress
from typing import Any, Literal

import numpy
import torch
import torch.distributed as dist

from miras_megatron.compat.cpu import core_without_cuda
from miras_megatron.config.schema import Parallel

from .exchange import Edges, StateRing
from .lost import RankLost, as_loss, tell_cause, with_first_cause
from .notices import Notices
from .rendezvous import RankInfo

Device = Literal["auto", "cpu", "cuda"]

STORES: Any = dist
"""torch.distributed, for the stores that its type stubs do not export."""


class ParallelMesh:
    """Process groups, coordinates and device of one rank.

    groups       megatron's ProcessGroupCollection: groups.tp, .pp, .cp, .dp, .dp_cp, ...
    tensor, pipeline, context, data          sizes of the axes
    tensor_rank, pipeline_rank, ...          this rank's place on them
    ring         this rank's neighbours along the context axis, between whom memory states go
    device, rank, world_size, info
    """

    def __init__(
        self,
        parallel: Parallel | None = None,
        info: RankInfo | None = None,
        *,
        device: Device = "auto",
        timeout: float = 600.0,
    ) -> None:
        """Join the other ranks and build the groups for `parallel`.

        timeout   seconds that any wait for another rank may take, here and in every collective

        Goes on from a process group that exists already, and then leaves it alive in `destroy`.
        Raises ValueError where the ranks do not fit `parallel` or the machine, or rank 0 can't open the place to meet;
        RankLost that names who was waited for there: its keeper, or the ranks that did not come.
        """
        parallel, self.info = parallel or Parallel(), info or RankInfo()
        self._timeout = datetime.timedelta(seconds=timeout)
        self.device = _pick_device(device, self.info)
        self._owns_world = not dist.is_initialized()
        self._older_groups = _known_groups()
        try:
            if self._owns_world:
                _start_world(self.info, self.device, self._timeout)
            self.rank, self.world_size, self._barriers = dist.get_rank(), dist.get_world_size(), 0
            _check_sizes(parallel, self.world_size)
            self._build_groups(parallel)
        except BaseException as error:
            lost = as_loss(error, f"rank {dist.get_rank() if dist.is_initialized() else self.info.rank}")
            self.destroy()
            if lost is not None:
                raise lost from error
            raise

    def _build_groups(self, parallel: Parallel) -> None:
        from megatron.core import parallel_state
        from megatron.core.process_groups_config import ProcessGroupCollection

        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            context_parallel_size=parallel.context,
            distributed_timeout_minutes=self._timeout / datetime.timedelta(minutes=1),  # core takes a fraction too
            create_gloo_process_groups=self.device.type == "cuda",
        )
        self.groups: Any = ProcessGroupCollection.use_mpu_process_groups()
        self.tensor, self.tensor_rank = self.groups.tp.size(), self.groups.tp.rank()
        self.pipeline, self.pipeline_rank = self.groups.pp.size(), self.groups.pp.rank()
        self.context, self.context_rank = self.groups.cp.size(), self.groups.cp.rank()
        self.data, self.data_rank = self.groups.dp.size(), self.groups.dp.rank()
        self.ring = self._join_ring()

    def _join_ring(self) -> StateRing:
        """This rank's neighbours along the context axis."""
        ranks, edges = dist.get_process_group_ranks(self.groups.cp), None
        if self.context > 1:
            edges = self._edges_of_nccl() if self.device.type == "cuda" else Edges.all_in(self.groups.cp)
        return StateRing(ranks, self.context_rank, edges, self._timeout.total_seconds(), self.coordinates)

    def _edges_of_nccl(self) -> Edges:
        """Communicators for each edge and direction, of this rank's ring; every rank makes those of all rings."""
        own = dist.get_process_group_ranks(self.groups.cp)
        rings: list[Any] = [None] * self.world_size
        dist.all_gather_object(rings, own)
        mine: list[Any] = []
        for ring in sorted(set(map(tuple, rings))):
            made = [dist.new_group(list(ring), timeout=self._timeout) for _ in range(4)]
            mine = made if list(ring) == own else mine
        return Edges(*mine)

    # -- where am I --------------------------------------------------------------------------------
    @property
    def is_main(self) -> bool:
        """Whether this rank speaks for all: logs, writes summaries."""
        return self.rank == 0

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return bool(self.pipeline_rank == 0)

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the output layer and the loss."""
        return bool(self.pipeline_rank == self.pipeline - 1)

    @property
    def coordinates(self) -> str:
        """Where this rank is, for messages: "dp0 pp1 cp3 tp0"."""
        return f"dp{self.data_rank} pp{self.pipeline_rank} cp{self.context_rank} tp{self.tensor_rank}"

    # -- together ----------------------------------------------------------------------------------
    def barrier(self, what: str) -> None:
        """Wait until every rank has come here; `what` names the place.

        Raises RankLost that names the ranks that did not come. After it the groups are of no more use.
        """
        store = STORES.distributed_c10d._get_default_store()
        self._barriers += 1
        marks = [f"barrier_{self._barriers}_{rank}" for rank in range(self.world_size)]
        try:
            store.set(marks[self.rank], what)
            dist.barrier(async_op=True).wait(self._timeout)
        except RuntimeError as error:
            patience = self._timeout.total_seconds()
            own = f"{self.name} waited at: {what}; not there after {patience:.0f} s, or dead: {_unmarked(store, marks)}"
            raise RankLost(with_first_cause(own)) from error
        if self._barriers > 1:
            # Everybody is past the barrier before this one, so nobody will ask for its mark any more.
            with suppress(RuntimeError):  # its keeper may have died since: the next wait tells
                store.delete_key(f"barrier_{self._barriers - 1}_{self.rank}")

    def open_notices(self) -> Notices | None:
        """A connection of its own to the store where the ranks met; None where the process group is somebody else's."""
        if not self._owns_world:
            return None
        store = STORES.distributed_c10d._get_default_store().clone()
        return Notices(STORES.PrefixStore("notices", store), _keeper(self.info))

    def seed(self, seed: int) -> None:
        """Seed every generator of this rank: python, numpy, torch, and core's tracker of named random states.

        Ranks of one model replica draw alike outside tensor-parallel regions. On a CPU call it inside
        `core_without_cuda`: there the tracker lives as long as the scope.
        """
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        with core_without_cuda():
            model_parallel_cuda_manual_seed(seed)

    def destroy(self) -> None:
        """Take the groups down, and the process group too where this mesh made it. Safe to call twice."""
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        if not dist.is_initialized():
            return
        if self._owns_world:
            dist.destroy_process_group()
            return
        # core only forgets its groups; each keeps threads that wake many times a second
        for group in _known_groups() - self._older_groups:
            dist.destroy_process_group(group)

    def __enter__(self) -> ParallelMesh:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Leave. What went wrong is told to the others first: theirs will be the failures of victims.

        Raises RankLost for an error of torch's that means another rank is gone.
        """
        try:
            if isinstance(error, Exception) and self.world_size > 1:
                lost = as_loss(error, self.name)
                if lost is not None:
                    raise lost from error
                tell_cause(f"{self.name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")
        finally:
            self.destroy()

    @property
    def name(self) -> str:
        """For messages: "rank 3 (dp0 pp0 cp1 tp1)"."""
        return f"rank {self.rank} ({self.coordinates})"


def _known_groups() -> set[Any]:
    """Every process group there is."""
    return set(STORES.distributed_c10d._world.pg_map)


def _pick_device(device: Device, info: RankInfo) -> torch.device:
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if info.local_rank >= count:
        raise ValueError(
            f"local rank {info.local_rank} of {info.local_size} has no GPU: this machine shows {count}; "
            f"start at most {count} processes here"
        )
    torch.cuda.set_device(info.local_rank)
    return torch.device("cuda", info.local_rank)


def _check_sizes(parallel: Parallel, world_size: int) -> None:
    if world_size % parallel.model_ranks:
        raise ValueError(
            f"parallel.tensor x pipeline x context = {parallel.tensor} x {parallel.pipeline} x {parallel.context} = "
            f"{parallel.model_ranks}: must divide the number of ranks, {world_size}; "
            f"start a multiple of {parallel.model_ranks} ranks"
        )


def _start_world(info: RankInfo, device: torch.device, timeout: datetime.timedelta) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = _meet(info, timeout) if info.world_size > 1 else STORES.HashStore()
    dist.init_process_group(
        backend, store=STORES.PrefixStore("world", store), rank=info.rank, world_size=info.world_size, timeout=timeout
    )


def _meet(info: RankInfo, timeout: datetime.timedelta) -> Any:
    """Connect to the store of the run and wait there for everybody, so that who is missing can be named."""
    serves = info.rank == 0 and not info.agent_keeps_store
    try:
        tcp = STORES.TCPStore(info.host, info.port, is_master=serves, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:
        place = f"the meeting place {info.host}:{info.port} ({info.launcher})"
        if serves:
            said = (str(error).splitlines() or [""])[0][:200]
            raise ValueError(f"rank 0 could not open {place}: {said}; free that port, or set MASTER_PORT") from error
        raise RankLost(
            f"rank {info.rank} could not reach {place} within {timeout.total_seconds():.0f} s: it waited for "
            f"{_keeper(info)}, which keeps it; is it running, and is the port open?"
        ) from error
    store = STORES.PrefixStore(f"miras/attempt_{info.attempt}", tcp)
    _wait_for_all(store, info, timeout)
    return store


def _keeper(info: RankInfo) -> str:
    return "torchrun's agent" if info.agent_keeps_store else "rank 0"


def _wait_for_all(store: Any, info: RankInfo, timeout: datetime.timedelta) -> None:
    """Say that this rank is here, and wait until all have said so."""
    deadline = time.monotonic() + timeout.total_seconds()
    missing = [rank for rank in range(info.world_size) if rank != info.rank]
    try:
        store.set(f"here_{info.rank}", "")
        while missing := [rank for rank in missing if not store.check([f"here_{rank}"])]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
    except RuntimeError as error:
        raise RankLost(
            f"rank {info.rank} waited at {info.host}:{info.port}, and {_keeper(info)}, which keeps that meeting place, "
            f"left; not there till then: ranks {_shorten(missing)}"
        ) from error
    if missing:
        raise RankLost(
            f"rank {info.rank} waited {timeout.total_seconds():.0f} s at {info.host}:{info.port}; "
            f"{len(missing)} of {info.world_size} ranks did not come: {_shorten(missing)}"
        )


def _unmarked(store: Any, marks: list[str]) -> str:
    """The ranks, in words, whose mark isn't in the store; it may have gone with the rank that keeps it."""
    try:
        missing = [rank for rank, mark in enumerate(marks) if not store.check([mark])]
    except RuntimeError:
        return "whoever keeps the store in which ranks meet (rank 0, or torchrun's agent)"
    return f"ranks {_shorten(missing) or 'that came and left'}"


def _shorten(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    return shown + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
