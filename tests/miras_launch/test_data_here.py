"""If these fail, a run waits hours in a queue for data that isn't there, or is refused for data that machines have."""

from __future__ import annotations

from pathlib import Path

import pytest
from miras_launch.cluster import Cluster
from miras_launch.data_here import MAYBE, missing_data
from miras_launch.main import main
from miras_launch.points import Point

from miras_megatron.config.schema import Checkpoint, Data, Run, RunFolder, Training

DEBUG = str(Path(__file__).resolve().parents[2] / "configs/runs/debug_cpu.yaml")
SLURM = Cluster(cache="/local/miras_$USER")


def missing(cluster: Cluster = SLURM, **data: object) -> tuple[list[str], list[str]]:
    return missing_data([Point(Run(data=Data(**data)), ())], cluster)  # type: ignore[arg-type]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run in, with one token set."""
    monkeypatch.chdir(tmp_path)
    for name in ("there.bin", "there.idx", "half.bin"):
        (tmp_path / name).write_text("x")
    return tmp_path


def test_what_is_there_is_not_missed(place: Path) -> None:
    """The shipped text needs no file; a pair may be named with its ending; a tokenizer may be a folder."""
    (place / "tokenizer.json").write_text("{}")
    assert missing() == ([], [])
    assert missing(train=["1 there", "2 there.bin", "shipped"], validation="there", tokenizer=".") == ([], [])


def test_every_field_is_told_once_with_its_way_out(place: Path) -> None:
    """In the words of miras-train, and for all points of a sweep together."""
    surely, perhaps = missing(train=["half", "nowhere", "nowhere"], validation="there", tokenizer="none.json")
    assert perhaps == []
    assert surely == [
        "data.train = 'half': half.idx is missing (half.bin is there); run miras-preprocess again with --overwrite, or "
        "correct the path",
        "data.train = 'nowhere': there is no nowhere.idx and no nowhere_text_document.idx; make them with "
        "miras-preprocess --output-prefix, or correct the path",
        "data.tokenizer = 'none.json': there is no such file; give \"bytes\", a tokenizer.json, or a folder that "
        "holds one",
    ]
    assert missing(validation="nowhere")[0][0].startswith("data.validation = 'nowhere': there is no ")


@pytest.mark.parametrize(
    ("path", "cluster", "sure"),
    [
        ("data/none", SLURM, True),
        ("/usr/none", SLURM, True),
        ("/tmp/none", SLURM, False),
        ("/usr/../tmp/none", SLURM, False),
        ("/dev/shm/none", SLURM, False),
        ("/local/none", SLURM, False),
        ("/usr/local/none", Cluster(cache="/usr/local/cache"), False),
        ("/usr/none", Cluster(cache="/$DISK/cache"), True),
        ("/no_such_disk/none", SLURM, False),
        ("data/none", Cluster(container="image.sqsh"), False),
        ("/usr/none", Cluster(launcher="mpi", wrapper=["apptainer"]), False),
        ("/usr/none", Cluster(launcher="mpi"), True),
        ("/tmp/none", Cluster(launcher="torchrun"), True),
    ],
)
def test_only_what_the_ranks_see_too_is_sure(place: Path, path: str, cluster: Cluster, sure: bool) -> None:
    """A login node has neither the machines' own disks nor what is in their image: there it can only remark."""
    surely, perhaps = missing(cluster, train=path)
    assert (len(surely), len(perhaps)) == ((1, 0) if sure else (0, 1))
    assert sure or perhaps[0].endswith(f"({MAYBE})")


def test_a_run_that_is_through_needs_no_data(place: Path) -> None:
    """A sweep that goes on must not be refused for the data of its finished points."""
    (place / "checkpoints").mkdir()
    (place / "checkpoints/latest").write_text("step_00000100")
    run = Run(data=Data(train="nowhere"), run=RunFolder(dir="."), training=Training(steps=100), checkpoint=Checkpoint())
    assert missing_data([Point(run, ())], SLURM) == ([], [])


def test_nothing_is_submitted_and_a_dry_run_only_remarks(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hours later the job would say the same; one who only looks at a layout may not have the data yet."""
    words = [DEBUG, "--cluster=slurm_cpu", "--training.micro_batch=1", "--data.train=nowhere"]
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == "" and "data.train = 'nowhere': there is no nowhere.idx" in said.err
    assert main([*words, "--dry-run"]) == 0
    assert "\nnote: data.train = 'nowhere': there is no nowhere.idx" in capsys.readouterr().out
    assert not (place / "runs").exists()
