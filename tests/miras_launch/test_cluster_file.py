"""If these fail, a site's file isn't found, or its mistakes come one by one, as a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from miras_launch.cluster_file import FOLDERS, known_clusters, load_cluster

from miras_megatron.config.errors import ConfigError

SHIPPED = sorted(FOLDERS[1].glob("*.yaml"))


def written(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_cluster_is_read(path: Path) -> None:
    """A user's first copy of it must not be broken from the start; its name says how many machines and ranks."""
    cluster, where = load_cluster(path.stem)
    assert Path(where).name == path.name
    size = path.stem.rpartition("_")[2]
    if "x" in size:
        assert f"{cluster.nodes}x{cluster.ranks_per_node}" == size


def test_a_cluster_is_found_by_path_too(tmp_path: Path) -> None:
    """A site's own file lies where the site wants it."""
    cluster, where = load_cluster(written(tmp_path, "nodes: 2\nranks_per_node: 4\npartition: long\n"))
    assert (cluster.nodes, cluster.world_size, cluster.partition, cluster.gpus) == (2, 8, "long", 4)
    assert where == str(tmp_path / "mine.yaml")


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    """Otherwise a file is mended in as many rounds as it has mistakes."""
    text = "nodes: two\npartitoin: long\ntime_limit: 24:00:00\nenvironment: {OMP_NUM_THREADS: 8}\ndoctor: 1\n"
    with pytest.raises(ConfigError) as told:
        load_cluster(written(tmp_path, text))
    said = str(told.value)
    assert "5 problems" in said
    for part in (
        "nodes = 'two': must be a whole number",
        "partitoin: unknown field; did you mean partition?",
        "time_limit = 86400: must be text or null; put it in quotes",
        "environment = {'OMP_NUM_THREADS': 8}: must be names and texts (in quotes)",
        "doctor = 1: must be true or false",
    ):
        assert part in said


def test_an_unknown_name_lists_those_there_are() -> None:
    """The user sees what to write."""
    with pytest.raises(ConfigError, match=r"did you mean slurm_8x8\?.*has .*local.*or give a path"):
        load_cluster("slurm_8x")
    assert {"local", "slurm_1x8", "slurm_8x8", "slurm_64x8"} <= set(known_clusters())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "must hold fields"),
        ("a: [", "not YAML"),
        ("partition: 2026-11-32", "not YAML: day is out of range"),
        ("options: " + "[" * 3000 + "]" * 3000, "too deep"),
        (None, "no such file"),
    ],
    ids=["list", "open", "date", "deep", "none"],
)
def test_a_file_that_is_none_is_one_message(tmp_path: Path, text: str | None, message: str) -> None:
    """No traceback for a path with a typo."""
    path = str(tmp_path / "none.yaml") if text is None else written(tmp_path, text)
    with pytest.raises(ConfigError, match=message):
        load_cluster(path)
