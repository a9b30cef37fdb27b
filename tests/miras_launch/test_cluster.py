"""If these fail, a wrong line in a cluster's file is found by a thousand ranks instead of by one message."""

from __future__ import annotations

from pathlib import Path

import pytest
from miras_launch import cluster as cluster_module
from miras_launch.cluster import OF_ONE_LAUNCHER, Cluster, problems_of, seconds_of
from miras_launch.cluster_file import FOLDERS, load_cluster

from miras_megatron.config.describe import docstrings
from miras_megatron.config.load import load_run

SOURCES = Path(cluster_module.__file__).parent

SLOW_GPU = 1.5e14
"""FLOP/s that a device reaches at least"""

CHECKPOINTS = 240.0
"""seconds for two checkpoints and a validation"""


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Cluster(nodes=0), "nodes = 0: must be above 0"),
        (Cluster(max_requeues=-1), "max_requeues = -1: must be at least 0"),
        (Cluster(time_limit="1h"), "time_limit = '1h': must be"),
        (Cluster(time_limit="00:05:00", signal_lead=300), "signal_lead = 300: the run would be asked to save before"),
        (Cluster(environment={"A B": "1"}), "environment.A B: no name of a variable"),
        (Cluster(environment={"Aé": "1"}), "environment.Aé: no name of a variable"),
        (Cluster(options=["--x\ry"]), "options: '--x\\ry' is no option; each is one line"),
        (Cluster(setup=["a", "b\0"]), "setup = ['a', 'b\\x00']: holds a NUL byte"),
        (Cluster(setup=["module load cuda", "echo 'x"]), "is no whole shell: line 2: unexpected EOF while looking for"),
        (Cluster(setup=["if true; then"]), "setup = ['if true; then']: is no whole shell: line 2: syntax error"),
        (Cluster(environment={"A": "\0"}), "environment = {'A': '\\x00'}: holds a NUL byte"),
        (Cluster(programs="/a\0b"), "programs = '/a\\x00b': holds a NUL byte"),
        (Cluster(time_limit="٢٤:00:00"), "time_limit = '٢٤:00:00': must be"),
        (Cluster(free_gib=float("nan")), "free_gib = nan: must be a number up to 1,000,000,000"),
        (Cluster(gpu_gib=float("inf")), "gpu_gib = inf: must be a number up to 1,000,000,000"),
        (Cluster(gpu_gib=float("nan")), "gpu_gib = nan: must be"),
        (Cluster(free_gib=10**400), "must be a number up to 1,000,000,000"),
        (Cluster(signal_lead=65_536), "signal_lead = 65536: must be a number up to 65,535"),
        (Cluster(nodes=1_000_001), "nodes = 1000001: must be a number up to 1,000,000"),
        (Cluster(ranks_per_node=10**8), "ranks_per_node = 100000000: must be a number up to 1,000,000"),
        (Cluster(launcher="mpi", mpirun=["mpirun", ""]), "mpirun = ['mpirun', '']: must hold the command"),
        (Cluster(options=["qos=long"]), "options: 'qos=long' is no option"),
        (Cluster(partition="a b"), "partition = 'a b': must be one word"),
        (Cluster(container_mounts=["/a:/a"]), "there is no container"),
        (Cluster(launcher="mpi", mpirun=[]), "mpirun = []"),
        (Cluster(launcher="mpi", partition="gpu"), "partition = 'gpu': launcher mpi doesn't read it; leave it out, or"),
        (Cluster(launcher="torchrun", setup=["module load x"]), "setup = ['module load x']: launcher torchrun doesn't"),
        (Cluster(launcher="torchrun", signal_lead=60), "signal_lead = 60: launcher torchrun doesn't read it"),
        (
            Cluster(mpirun=["srun"]),
            "mpirun = ['srun']: launcher slurm doesn't read it; leave it out, or set launcher: mpi",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_cannot_be_is_refused_by_name(wrong: Cluster, message: str) -> None:
    """Slurm would say it of a line of a script that the user never wrote, or nothing at all."""
    assert [line for line in problems_of(wrong) if message in line]


def test_every_field_is_read_by_some_launcher() -> None:
    """A field that the table forgets is accepted and ignored; one of all launchers in it is refused where it works."""
    own = {name for names in OF_ONE_LAUNCHER.values() for name in names}
    files = {
        launcher: (SOURCES / f"{name}.py").read_text() for launcher, name in {"slurm": "slurm", "mpi": "ranks"}.items()
    }
    for launcher, names in OF_ONE_LAUNCHER.items():
        for name in names:
            assert f"cluster.{name}" in files[launcher], name
    assert {
        "launcher",
        "nodes",
        "wrapper",
        "environment",
        "cache",
        "doctor",
    } <= Cluster.__dataclass_fields__.keys() - own


def test_a_long_step_fits_before_the_time_ends() -> None:
    """One step of titans_lmm_1b3_2m on 8 GPUs takes up to 1,000 s: warned 300 s before, it never saves again."""
    for name, nodes in (("slurm_1x8", 1), ("slurm_8x8", 8), ("slurm_64x8", 64)):
        run = load_run([str(FOLDERS[1].parent / "runs/titans_lmm_1b3_2m.yaml")])
        tokens = run.training.global_batch * run.data.sequence_length
        slowest = 6 * 1.13e9 * tokens * 4 / 3 / (8 * nodes) / SLOW_GPU
        assert load_cluster(name)[0].signal_lead > 2 * slowest + CHECKPOINTS, name


def test_time_limits_are_read_as_slurm_reads_them() -> None:
    """Else the warning comes at another moment than the check believes."""
    assert seconds_of("1-02:03:04") == 93784
    assert seconds_of("72:00:00") == 259200
    assert seconds_of("90") is None


def test_every_field_says_what_it_is() -> None:
    """These lines are the manual of the file."""
    assert set(docstrings(Cluster)) == set(Cluster.__dataclass_fields__)
