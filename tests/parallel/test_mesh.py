"""ParallelMesh: the right groups, built once, and messages that name who is missing."""

import datetime
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.worlds import run_world

from miras_megatron.config.schema import Parallel
from miras_megatron.parallel import mesh as mesh_module
from miras_megatron.parallel.lost import RankLost
from miras_megatron.parallel.mesh import ParallelMesh
from miras_megatron.parallel.rendezvous import RankInfo


def test_a_world_of_one_needs_no_launcher():
    """`miras-train` on a laptop takes the same path as on a cluster, alone with itself."""
    assert not dist.is_initialized()
    for _ in range(2):
        with ParallelMesh(device="cpu", timeout=5) as mesh:
            assert (mesh.rank, mesh.world_size, mesh.coordinates) == (0, 1, "dp0 pp0 cp0 tp0")
            assert mesh.is_main and mesh.is_first_stage and mesh.is_last_stage
            assert mesh.groups.tp.size() == mesh.groups.dp_cp.size() == 1
            mesh.barrier("test")
        mesh.destroy()
        assert not dist.is_initialized()


def place(parallel):
    with ParallelMesh(parallel, device="cpu") as mesh:
        mesh.barrier("test")
        sums = {}
        for axis in ("tp", "pp", "cp", "dp"):
            total = torch.tensor(10.0**mesh.rank)
            dist.all_reduce(total, group=getattr(mesh.groups, axis))
            sums[axis] = total.item()
        return mesh.coordinates, (mesh.tensor, mesh.pipeline, mesh.context, mesh.data), sums


@pytest.mark.parametrize(("axis", "name"), [("tensor", "tp"), ("pipeline", "pp"), ("context", "cp"), ("data", "dp")])
def test_two_ranks_on_each_axis(axis, name):
    """Ranks that sum over the wrong group train on each other's halves. One launch serves all layouts."""
    parallel = Parallel(**{axis: 2}) if axis != "data" else Parallel()
    for rank, (coordinates, sizes, sums) in enumerate(run_world(2, place, parallel)):
        assert f"{name}{rank}" in coordinates
        assert sizes[["tensor", "pipeline", "context", "data"].index(axis)] == 2
        assert sums.pop(name) == 11.0
        assert set(sums.values()) == {10.0**rank}


def test_every_group_waits_as_long_as_asked():
    """core takes minutes: rounded, a rank that hangs would hold the others longer than parallel.timeout says."""
    with ParallelMesh(device="cpu", timeout=7.5) as mesh:
        for group in (mesh.groups.tp, mesh.groups.pp, mesh.groups.cp, mesh.groups.dp, mesh.groups.dp_cp):
            assert group._get_backend(mesh.device).options._timeout == datetime.timedelta(seconds=7.5)


def test_sizes_that_do_not_divide_are_named():
    """A user with 1 process and parallel.tensor = 2 learns how many to start, and nothing stays half built."""
    with pytest.raises(
        ValueError, match=r"parallel\.tensor x pipeline x context = 2 x 1 x 3 = 6.*start a multiple of 6"
    ):
        ParallelMesh(Parallel(tensor=2, context=3), device="cpu")
    assert not dist.is_initialized()


def test_missing_ranks_are_named():
    """On a thousand GPUs "time-out" is no message; which ranks did not come is."""
    store = dist.HashStore()
    store.set("here_2", "")
    with pytest.raises(RankLost, match=r"rank 0 waited 0 s at a1:5; 2 of 4 ranks did not come: 1, 3"):
        mesh_module._wait_for_all(store, RankInfo(world_size=4, host="a1", port=5), datetime.timedelta(seconds=0.1))
    assert mesh_module._shorten(list(range(20))).endswith("15 and 4 more")


@pytest.mark.parametrize(("launcher", "keeper"), [("slurm", "rank 0"), ("torchrun", "torchrun's agent")])
def test_a_meeting_place_nobody_keeps_is_named(launcher, keeper):
    """A rank whose first one never came has lost a rank: who, and where it waited, not "something to mend"."""
    info = RankInfo(rank=1, world_size=2, port=9, launcher=launcher, agent_keeps_store=launcher == "torchrun")
    place = rf"rank 1 could not reach the meeting place 127\.0\.0\.1:9 \({launcher}\) within 1 s"
    with pytest.raises(RankLost, match=f"^{place}: it waited for {keeper}, which keeps it"):
        ParallelMesh(info=info, device="cpu", timeout=1.0)
    assert not dist.is_initialized()


def test_a_keeper_that_leaves_the_meeting_is_a_lost_rank():
    """Rank 0 gives up first, and its store goes with it: the others must not end in a traceback about a socket."""
    gone = mock.Mock()
    gone.check.side_effect = [True, False, dist.DistNetworkError("Connection reset by peer")]
    info = RankInfo(rank=1, world_size=3, host="a1", port=5)
    with pytest.raises(
        RankLost, match=r"^rank 1 waited at a1:5, and rank 0, which .* left; not there till then: ranks 2$"
    ):
        mesh_module._wait_for_all(gone, info, datetime.timedelta(seconds=60))


def test_a_port_that_is_taken_is_something_to_mend():
    """Whoever restarts runs that lost a rank would restart this one for ever."""
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        info = RankInfo(world_size=2, port=other.getsockname()[1], launcher="slurm")
        with pytest.raises(ValueError, match=rf"^rank 0 could not open .*:{info.port} \(slurm\): .*set MASTER_PORT$"):
            ParallelMesh(info=info, device="cpu", timeout=1.0)


def test_a_collective_that_fails_while_the_world_starts_is_a_lost_rank(monkeypatch):
    """A rank may die between the meeting and the first group: its neighbours then see a broken connection."""

    def connect(*_, **__):
        raise RuntimeError("Gloo connectFullMesh failed with: Connection closed by peer")

    torchs = FunctionType(
        connect.__code__, {"__name__": "torch.distributed.distributed_c10d", "RuntimeError": RuntimeError}
    )
    monkeypatch.setattr(mesh_module.dist, "init_process_group", torchs)
    with pytest.raises(RankLost, match="^rank 0 lost another rank in a collective: Gloo"):
        ParallelMesh(device="cpu")


def test_ranks_meet_at_the_first_ones_store():
    """Without torchrun's agent rank 0 keeps the store itself; both must end up in the same one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    patience = datetime.timedelta(seconds=60)
    infos = [RankInfo(rank=rank, world_size=2, port=port, launcher="slurm") for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda info: mesh_module._meet(info, patience), infos)
    first.set("word", "heard")
    assert second.get("word") == b"heard"


def come_late():
    mesh = ParallelMesh(device="cpu", timeout=3)
    mesh.barrier("both")
    if mesh.rank == 0:
        mesh.barrier("saving")
    time.sleep(4)


def test_who_does_not_come_to_a_barrier_is_named():
    """A run of a thousand ranks that hangs at a checkpoint must say which of them to look at."""
    with pytest.raises(
        RuntimeError, match=r"RankLost: rank 0 \(dp0 .* waited at: saving; not there after 3 s.*ranks 1\n"
    ):
        run_world(2, come_late)


def test_a_barrier_ends_as_a_lost_rank_where_the_store_went_with_it(monkeypatch):
    """Rank 0 may keep the store: when it dies, the others must not end in a traceback of looking for the missing."""
    gone = mock.Mock()
    gone.set.side_effect = gone.check.side_effect = gone.compare_set.side_effect = dist.DistNetworkError("Broken pipe")
    with ParallelMesh(device="cpu", timeout=5) as mesh:
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: gone)
        with pytest.raises(
            RankLost, match=r"^rank 0 \(dp0 pp0 cp0 tp0\) waited at: saving; .* dead: whoever keeps the"
        ):
            mesh.barrier("saving")
        monkeypatch.undo()
