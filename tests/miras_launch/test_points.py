"""If these fail, a sweep leaves runs out, trains one twice, or two of them write into one folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from miras_launch import points as points_module
from miras_launch.points import Point, grid, points_of, saved_step

from miras_megatron.config.errors import ConfigError
from miras_megatron.config.load import load_run

DEBUG = str(Path(__file__).resolve().parents[2] / "configs/runs/debug_cpu.yaml")


def swept(*sweep: str, ranks: int = 1, words: tuple[str, ...] = ()) -> list[Point]:
    own = [DEBUG, *words]
    return points_of(own, DEBUG, load_run(own), sweep, ranks)


def test_a_grid_is_every_combination_with_a_folder_each() -> None:
    """The folder's name says what is different about a run."""
    points = swept("optimizer.lr=1e-3,3e-3", "model.layers=1,2,3")
    assert len(points) == 6 == len({point.folder for point in points})
    assert (points[4].run.optimizer.lr, points[4].run.model.layers) == (3e-3, 2)
    assert points[4].folder == Path("runs/debug_cpu/lr=3e-3,layers=2")
    assert points[4].words[-1] == "--run.dir=runs/debug_cpu/lr=3e-3,layers=2"


@pytest.mark.parametrize("said", [("--run.dir=mine",), ("--run.dir", "mine"), ("-run.dir=mine", "--run.dir=mine")])
def test_a_points_words_name_its_folder_once(said: tuple[str, ...]) -> None:
    """A reader of the command line must not have to know that the last of two folders is meant."""
    for point in swept("optimizer.lr=1e-3,3e-3", words=(*said, "--model.layers=3")):
        folders = [word for word in point.words if "run.dir" in word]
        assert folders == [f"--run.dir={point.folder}"] and point.folder.parent == Path("mine")
        assert point.words[:2] == (DEBUG, "--model.layers=3") and "mine" not in point.words


@pytest.mark.parametrize(
    "sweep",
    [
        ["optimizer.lr=1e-3,3e-3", "memory.options={objective: lp, p: 3.0},{objective: lp, p: 4.0}"],
        ["data.needles=null,{rows: 0.25}", "training.precision=bf16"],
        ["data.needles.rows=0.5,0.75", "model.layers=1,2"],
        ["evaluate.needle_lengths=[1,4],[1,2]", 'data.train=shipped,["1 shipped", "2 shipped"]'],
        ["memory.lr_max=null,0.1", "parallel.pieces=auto,1"],
    ],
)
def test_a_points_run_is_what_its_words_say(sweep: list[str]) -> None:
    """Under Slurm the run is trained, elsewhere the words are: they would be two different sweeps."""
    for point in swept(*sweep, words=("--data.needles.per_row=1", "--optimizer.lr=0.002")):
        assert load_run(point.words) == point.run


def test_a_point_costs_no_reading_of_the_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 points took half a minute of silence, on login nodes where many share a core."""
    words, run = [DEBUG], load_run([DEBUG])
    monkeypatch.setattr(points_module, "parse_command_line", lambda *_, **__: pytest.fail("the whole run is read"))
    assert len(points_of(words, DEBUG, run, ["optimizer.lr=1e-3,2e-3", "model.layers=1,2"], 1)) == 4


def test_without_a_sweep_there_is_one_run_where_it_says() -> None:
    """Its words are those that were typed."""
    (point,) = swept()
    assert (point.words, point.folder) == ((DEBUG,), Path("runs/debug_cpu"))


def test_lists_and_paths_are_single_values() -> None:
    """A comma inside a list is no border, and a path makes no folders in a folder's name."""
    assert grid(["evaluate.needle_lengths=[1,4],[1,4,16]"]) == [
        {"evaluate.needle_lengths": "[1,4]"},
        {"evaluate.needle_lengths": "[1,4,16]"},
    ]
    points = swept("data.train=shipped,data/book/text")
    assert [point.folder.name for point in points] == ["train=shipped", "train=data_book_text"]


def test_fields_of_one_name_keep_their_section() -> None:
    """training.seed and data.seed would make one folder's name of two fields."""
    assert swept("training.seed=1", "data.seed=2")[0].folder.name == "training.seed=1,data.seed=2"


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        (["optimizer.lr"], "must be field=a,b,c"),
        (["optimizer.lr=1,,2"], "must be field=a,b,c"),
        (["optimizer.lr=1,1"], "given twice"),
        (["optimizer.lr=1e-3,1.0e-3"], "--sweep: lr=1e-3 and lr=1.0e-3 are the same run; keep one"),
        (["model.layers=1", "model.layers=2"], "swept twice"),
        (["run.dir=a,b"], "a folder of its own already"),
        (["optimizer.rl=1,2"], "optimizer.rl: unknown field"),
        (["model.layers=two,2"], "model.layers = 'two': must be a whole number"),
        (["model.layers=0,-1"], "model.layers = -1: must be above 0"),
        (["data.train=a/b,a_b"], "a folder's name alike"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_anything_starts(sweep: list[str], message: str) -> None:
    """The problems of all points are told at once, each once."""
    with pytest.raises(ConfigError) as told:
        swept(*sweep)
    assert message in str(told.value)


def test_a_run_is_finished_at_its_last_step(tmp_path: Path) -> None:
    """Else a sweep that is submitted again trains what is done, or leaves out what isn't, such as after more steps."""
    folder = tmp_path / "checkpoints"
    assert saved_step(tmp_path) == 0
    folder.mkdir()
    (folder / "latest").write_text("step_00000040")
    assert saved_step(tmp_path) == 40
    words = [DEBUG, f"--run.dir={tmp_path}"]
    assert Point(load_run(words), tuple(words)).finished
    assert not Point(load_run([*words, "--training.steps=41"]), ()).finished
    (folder / "latest").write_text("rubbish")
    assert saved_step(tmp_path) == 0
