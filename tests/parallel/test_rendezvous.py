"""Who am I: one answer for every launcher."""

import sys
import types

import pytest

from miras_megatron.parallel.rendezvous import RankInfo, find_rank, first_host

TORCHRUN = {
    **{"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
    **{"MASTER_ADDR": "a1", "MASTER_PORT": "29500"},
    **{"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"},
}
SLURM = {
    **{"SLURM_STEP_ID": "3", "SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "11"},
    **{"SLURM_LOCALID": "1", "SLURM_NODEID": "2"},
    **{"SLURM_STEP_NODELIST": "gpu[003-004,7]", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_JOB_ID": "77"},
}


def test_a_process_of_its_own_is_a_world_of_one():
    """`miras-train run.yaml` without any launcher must train."""
    assert find_rank({"HOME": "/root", "WORLD_SIZE": "4"}) == RankInfo()


def test_torchrun():
    """Taking the wrong variable puts two ranks on one GPU."""
    info = find_rank(TORCHRUN | SLURM)
    assert (info.rank, info.world_size, info.local_rank, info.local_size) == (5, 8, 1, 4)
    assert (info.host, info.port, info.agent_keeps_store, info.attempt) == ("a1", 29500, True, 2)


def test_slurm():
    """srun sets no MASTER_ADDR; every task has to derive the same meeting place."""
    info = find_rank(SLURM)
    assert (info.rank, info.world_size, info.local_rank, info.local_size) == (9, 11, 1, 3)
    assert info.host == "gpu003" and info.launcher == "slurm"
    assert info.port == find_rank(SLURM | {"SLURM_PROCID": "0"}).port
    assert info.port != find_rank(SLURM | {"SLURM_STEP_ID": "4"}).port


def test_a_batch_script_is_not_a_task():
    """In a batch script SLURM sets a rank and the job's task count; waiting for those tasks would never end."""
    assert find_rank({"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_LOCALID": "0"}) == RankInfo()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("gpu[003-007,12],x", "gpu003"), ("a-b[9,11-12]", "a-b9"), ("r[1-2]n5,q", "r1n5")],
)
def test_first_host(nodes, first):
    """Rank 0 lives on the first node; any other name makes every rank wait for nobody."""
    assert first_host(nodes) == first


def test_mpi(monkeypatch):
    """mpirun gives no meeting place: rank 0 must tell the others where it is."""
    sent = []

    class Comm:
        def __init__(self, rank, size):
            self.rank, self.size = rank, size

        def Get_rank(self):
            return self.rank

        def Get_size(self):
            return self.size

        def Split_type(self, kind):
            return Comm(1, 2)

        def bcast(self, value, root):
            sent.append(value)
            return ("head", 4242)

    mpi = types.SimpleNamespace(COMM_WORLD=Comm(3, 4), COMM_TYPE_SHARED=1)
    monkeypatch.setitem(sys.modules, "mpi4py", types.SimpleNamespace(MPI=mpi))
    info = find_rank({"OMPI_COMM_WORLD_SIZE": "4"})
    assert info == RankInfo(rank=3, world_size=4, local_rank=1, local_size=2, host="head", port=4242, launcher="mpi")
    assert sent == [None]
    assert find_rank(SLURM | {"OMPI_COMM_WORLD_SIZE": "4"}) == info, "mpirun in a job of Slurm: its ranks are MPI's"
    mpi.COMM_WORLD.rank = 0
    find_rank({"OMPI_COMM_WORLD_SIZE": "4"})
    assert isinstance(sent[-1], tuple) and sent[-1][1] > 0


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not"),
        (TORCHRUN | {"RANK": "x"}, "RANK = 'x'"),
        (TORCHRUN | {"RANK": "8"}, "rank 8 of 8"),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}, "SLURM_NTASKS is not set"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4x2"}, "must look like"),
    ],
)
def test_half_an_environment_is_refused_by_name(environment, message):
    """A missing variable must be named, not show up as a hang on a thousand GPUs."""
    with pytest.raises(ValueError, match=message):
        find_rank(environment)


def test_missing_mpi4py_names_the_command(monkeypatch):
    """The user sees what to install."""
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ValueError, match="pip install mpi4py"):
        find_rank({"PMI_SIZE": "2"})
