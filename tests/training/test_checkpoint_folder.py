"""Checkpoints as files: whole or absent."""

import os

import pytest
from helpers.small_checkpoint import nothing, save

from miras_megatron.training.checkpoint_folder import (
    begin_checkpoint,
    complete_checkpoints,
    find_checkpoint,
    keep_newest,
    latest_checkpoint,
)


def test_the_newest_is_found(tmp_path):
    """`--resume auto` goes on from here."""
    assert latest_checkpoint(tmp_path) is None
    for step in (5, 10):
        save(tmp_path, step)
    assert latest_checkpoint(tmp_path).name == "step_00000010"
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_00000010\n"


def test_a_save_that_fails_leaves_the_one_before(tmp_path):
    """A full disk in the middle of a save must not cost the run."""
    save(tmp_path, 5)
    (begin_checkpoint(tmp_path, 10, 0, nothing) / "data").write_text("half")
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_00000005"]
    assert latest_checkpoint(tmp_path).name == "step_00000005"
    save(tmp_path, 10)
    assert latest_checkpoint(tmp_path).name == "step_00000010"


@pytest.mark.parametrize("in_the_way", ["latest.PID.tmp", "latest"])
def test_one_that_cannot_be_made_latest_gets_no_name(tmp_path, in_the_way):
    """It lay there as if complete, while the message told of the one before and the next start went on from that."""
    save(tmp_path, 5)
    path = tmp_path / "checkpoints" / in_the_way.replace("PID", str(os.getpid()))
    path.unlink(missing_ok=True)
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        save(tmp_path, 10)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_00000005"]
    assert latest_checkpoint(tmp_path).name == "step_00000005"
    path.rmdir()
    save(tmp_path, 10)
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_00000010\n"


def test_latest_may_be_lost(tmp_path):
    """The pointer is a convenience: a kill between the rename and the pointer loses nothing."""
    for step in (5, 10):
        save(tmp_path, step)
    pointer = tmp_path / "checkpoints" / "latest"
    pointer.write_text("step_00000099\n")
    assert latest_checkpoint(tmp_path).name == "step_00000010"
    pointer.unlink()
    assert latest_checkpoint(tmp_path).name == "step_00000010"


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"x" * 5000, b"../step_00000005", b"", b"step_5\x00"])
def test_a_latest_that_names_nothing_is_passed_over(tmp_path, content):
    """A run with whole checkpoints ended in a traceback over one broken pointer, or left its folder by it."""
    for step in (5, 10):
        save(tmp_path, step)
    (tmp_path / "checkpoints" / "latest").write_bytes(content)
    assert latest_checkpoint(tmp_path).name == "step_00000010"


def test_a_repeated_step_replaces_its_folder(tmp_path):
    """A run resumed from an earlier checkpoint reaches the same step again."""
    save(tmp_path, 5, "old")
    folder = save(tmp_path, 5, "new")
    assert (folder / "data").read_text() == "new"
    assert sorted(path.name for path in folder.parent.iterdir()) == ["latest", "step_00000005"]


@pytest.mark.parametrize(("keep", "left"), [(0, 4), (1, 1), (3, 3), (9, 4)])
def test_the_newest_n_are_kept(tmp_path, keep, left):
    """Disks fill up; but 0 keeps all."""
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    keep_newest(tmp_path, keep)
    assert [path.name for path in complete_checkpoints(tmp_path)] == [f"step_{s:08d}" for s in range(5 - left, 5)]


def test_a_copy_that_its_user_named_is_left_alone(tmp_path):
    """Whoever sets a checkpoint aside wants it to stay, and a run must not go on from it."""
    copy = save(tmp_path, 5).rename(tmp_path / "checkpoints" / "step_00000005_best")
    for step in (10, 15):
        save(tmp_path, step)
    keep_newest(tmp_path, 1)
    assert copy.is_dir() and [path.name for path in complete_checkpoints(tmp_path)] == ["step_00000015"]


def test_a_named_checkpoint_that_is_not_there_is_refused_by_name(tmp_path):
    """Starting anew instead would waste days."""
    with pytest.raises(ValueError, match=r"checkpoint.resume = .*nowhere: does not exist"):
        find_checkpoint(tmp_path / "nowhere", "checkpoint.resume")
    with pytest.raises(ValueError, match="holds no complete checkpoint"):
        find_checkpoint(tmp_path, "training.init_from")
    folder = save(tmp_path, 7)
    assert find_checkpoint(tmp_path, "checkpoint.resume") == find_checkpoint(folder, "checkpoint.resume") == folder
