"""What may lie in run.dir: if these fail, a run ends in a traceback over it, some after hours of training."""

import pytest
from helpers.tiny_run import tiny_config

from miras_megatron.config.load import load_run
from miras_megatron.training.run_folder import find_start


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: (folder / "metrics.jsonl").mkdir(parents=True), "metrics.jsonl is a folder"),
        (lambda folder: (folder / "config.yaml").mkdir(parents=True), "config.yaml is a folder"),
        (lambda folder: folder.mkdir() or (folder / "tb").write_text("x"), "tb is no folder"),
        (lambda folder: folder.mkdir() or (folder / "checkpoints").write_text("x"), "checkpoints is no folder"),
        (lambda folder: folder.write_text("x"), ": is no folder"),
    ],
)
def test_what_stands_in_the_way_is_told_at_the_start(tmp_path, make, message):
    """A file in place of checkpoints/ was found at the first save."""
    run = load_run(tiny_config(tmp_path))
    assert find_start(run) is None
    make(tmp_path / "run")
    with pytest.raises(ValueError, match=rf"run\.dir = .*{message}"):
        find_start(run)


@pytest.mark.parametrize("name", ["x" * 300, "text.bin/run", "text.bin"])
def test_a_path_that_cant_be_is_told_at_the_start(tmp_path, name):
    """Not by an OSError, and not after the model was built."""
    with pytest.raises(ValueError, match=r"run\.dir = "):
        find_start(load_run(tiny_config(tmp_path, run__dir=tmp_path / name)))
