"""The files of a checkpoint are those that were written, or it is refused."""

import errno
import hashlib
import json
import os

import pytest
from helpers.small_checkpoint import save

from miras_megatron.training import checkpoint_manifest
from miras_megatron.training.checkpoint_manifest import damaged_files, describe, read_manifest, refuse_damaged
from miras_megatron.training.signs import SIGNS


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
    monkeypatch.setattr(checkpoint_manifest, "BLOCK", 10)
    (tmp_path / "data").write_bytes(bytes(95))
    before = SIGNS.count
    assert describe(tmp_path / "data") == {"bytes": 95, "sha256": hashlib.sha256(bytes(95)).hexdigest()}
    assert SIGNS.count == before + 10


def test_a_file_that_the_system_does_not_open_is_not_called_damaged(tmp_path, monkeypatch):
    """Too many open files: whoever believes that the checkpoint is damaged goes on from an older one."""
    folder = save(tmp_path, 5)

    def refuse(path):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(checkpoint_manifest, "describe", refuse)
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
