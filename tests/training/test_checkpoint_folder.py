"""Checkpoints as files: whole or absent, and checked."""

import errno
import hashlib
import json
import os

import pytest

from miras_megatron.training import checkpoint_folder
from miras_megatron.training.checkpoint_folder import (
    NEEDED,
    begin_checkpoint,
    complete_checkpoint,
    complete_checkpoints,
    damaged_files,
    describe,
    find_checkpoint,
    keep_newest,
    latest_checkpoint,
    read_manifest,
    refuse_damaged,
    write_manifest,
)
from miras_megatron.training.signs import SIGNS


def nothing():
    pass


def save(run_dir, step, content="weights"):
    folder = begin_checkpoint(run_dir, step, 0, nothing)
    for name in ("data", "__0_0.distcp", *NEEDED):
        (folder / name).write_text(content)
    write_manifest(folder, step, {path.name: describe(path) for path in folder.iterdir()})
    return complete_checkpoint(run_dir, step, 0, nothing)


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


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "data").write_text("weightz"), "data has changed since it was written"),
        (lambda f: (f / "data").write_text("wei"), "data has 3 bytes, 7 were written"),
        (lambda f: (f / "data").unlink(), "data is missing"),
    ],
)
def test_a_damaged_file_is_refused_by_name_with_the_way_out(tmp_path, damage, message):
    """Silently wrong weights are worse than none."""
    save(tmp_path, 5)
    folder = save(tmp_path, 10)
    assert damaged_files(folder) == []
    damage(folder)
    with pytest.raises(ValueError, match=message) as e:
        refuse_damaged(folder, damaged_files(folder))
    assert "--resume" in str(e.value)
    assert "step_00000005" in str(e.value)


def test_a_large_file_gives_signs_of_life_while_it_is_read(tmp_path, monkeypatch):
    """Digests of a large model take longer than the watchdog's limit, and every rank would be ended at each save."""
    monkeypatch.setattr(checkpoint_folder, "BLOCK", 10)
    (tmp_path / "data").write_bytes(bytes(95))
    before = SIGNS.count
    assert describe(tmp_path / "data") == {"bytes": 95, "sha256": hashlib.sha256(bytes(95)).hexdigest()}
    assert SIGNS.count == before + 10


def test_a_file_that_the_system_does_not_open_is_not_called_damaged(tmp_path, monkeypatch):
    """Too many open files: whoever believes that the checkpoint is damaged goes on from an older one."""
    folder = save(tmp_path, 5)

    def refuse(path):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(checkpoint_folder, "describe", refuse)
    problems = damaged_files(folder)  # of this rank: all of them agree on the answer before they raise
    with pytest.raises(ValueError, match=r"data can't be read \(Too many open files\); mend that") as told:
        refuse_damaged(folder, problems)
    assert "damaged" not in str(told.value)


def test_a_newer_format_is_refused(tmp_path):
    """An old reader would misunderstand it."""
    folder = save(tmp_path, 5)
    (folder / "manifest.json").write_text('{"format": 99, "step": 5, "files": {}}')
    with pytest.raises(ValueError, match="checkpoint format 99"):
        read_manifest(folder)
    for torn in ('{"format": 1,', "[" * 100_000):
        (folder / "manifest.json").write_text(torn)
        with pytest.raises(ValueError, match=r"manifest.json can't be read"):
            read_manifest(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda files: files.clear(), r"manifest.json doesn't name .metadata, common.pt, config.yaml, __0_0.distcp;"),
        (lambda files: files.pop("__0_0.distcp"), r"manifest.json doesn't name __0_0.distcp;"),
        (lambda files: files["data"].pop("bytes"), r"manifest.json doesn't say what data was"),
        (lambda files: files.update(data=7), r"manifest.json doesn't say what data was"),
    ],
)
def test_a_manifest_that_checks_nothing_is_refused(tmp_path, change, message):
    """With an empty list of files any weights passed for verified."""
    folder = save(tmp_path, 5)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"]  # as one that was written without
    change(manifest["files"])
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=message):
        damaged_files(folder)
