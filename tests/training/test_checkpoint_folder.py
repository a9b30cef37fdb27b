"""Checkpoints as files: whole or absent, checked, and never running anybody's code."""

import io
import json
import os
import pickle
import resource

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, Metadata

from miras_megatron.training.checkpoint_folder import (
    NEEDED,
    _IndexReader,
    begin_checkpoint,
    complete_checkpoint,
    complete_checkpoints,
    damaged_files,
    describe,
    find_checkpoint,
    keep_newest,
    latest_checkpoint,
    read_index,
    read_manifest,
    read_plain,
    refuse_damaged,
    write_manifest,
    write_plain,
)
from miras_megatron.training.stored_tensors import write_tensors


def nothing():
    pass


def save(run_dir, step, content="weights"):
    folder = begin_checkpoint(run_dir, step, 0, nothing)
    for name in ("data", "__0_0.distcp", *NEEDED):
        (folder / name).write_text(content)
    write_manifest(folder, step, {path.name: describe(path) for path in folder.iterdir()})
    return complete_checkpoint(run_dir, step, 0, nothing)


class Bomb:
    def __reduce__(self):
        return os.system, ("touch /tmp/never",)


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
    "write",
    [
        lambda folder: write_plain(folder / "common.pt", {"tensor": torch.zeros(100_000)}),
        lambda folder: write_tensors(folder, [("weight", torch.zeros(100_000))]),
    ],
)
def test_a_disk_that_takes_no_more_is_said_as_the_system_says_it(write, tmp_path):
    """torch.save ends in an error about positions in a stream; the commands tell a full disk from a fault of ours."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


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


def test_the_index_runs_nobodys_code(tmp_path):
    """torch reads it by pickle.load: a checkpoint from a stranger could do anything."""
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match=r"\.metadata can't be read: .*system is not allowed"):
        read_index(tmp_path)


def test_a_byte_that_changed_in_the_index_is_damage(tmp_path):
    """miras-inspect --no-verify reads it without its digest: what pickle makes of it then is nobody's traceback."""
    field = pickle.dumps(Metadata({})).replace(b"state_dict_metadata", b"state_dict_netadata")
    layout = pickle.dumps(torch.strided).replace(b"strided", b"stridee")
    for content in (field, layout, b"\x80\x04\x8e" + b"\x7f" * 8):
        (tmp_path / ".metadata").write_bytes(content)
        with pytest.raises(ValueError, match=r"damaged checkpoint: .*\.metadata (can't be read|is no index)"):
            read_index(tmp_path)


@pytest.mark.parametrize("part", ["size", "properties", "chunks"])
def test_a_tensor_that_the_index_does_not_describe_is_damage(tmp_path, part):
    """A changed byte in the name of a field leaves an object without that field, and every reader asks for it."""
    write_tensors(tmp_path, [("weight", torch.zeros(2, 3))])
    entry = read_index(tmp_path)["weight"]
    setattr(entry, part, None)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({"weight": entry})))
    with pytest.raises(ValueError, match=r"damaged checkpoint: .*\.metadata doesn't say what weight is"):
        read_index(tmp_path)


def test_pickled_objects_among_the_tensors_are_refused(tmp_path):
    """torch loads them with weights_only=False."""
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({"trap": BytesStorageMetadata()})))
    with pytest.raises(ValueError, match="trap is a pickled object"):
        read_index(tmp_path)


@pytest.mark.parametrize("force", [False, True])
def test_the_common_state_is_plain_values_with_known_names(tmp_path, monkeypatch, force):
    """Neither megatron-core's additions to torch's allow-list nor an environment variable opens a door."""
    import megatron.core  # noqa: F401  adds classes to torch's allow-list

    if force:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    path = tmp_path / "common.pt"
    torch.save({"step": 3, "x": torch.ones(2)}, path)
    assert read_plain(path, ("step", "x"))["step"] == 3
    with pytest.raises(ValueError, match="unknown entries x; allowed are step"):
        read_plain(path, ("step",))
    for trap in (Bomb(), __import__("argparse").Namespace(a=1)):
        torch.save({"step": trap}, path)
        with pytest.raises(ValueError, match="can't be read as tensors and plain values"):
            read_plain(path, ("step",))
    for content in (b"no checkpoint", b"Once upon a time\n", b"", b"hello world, " * 99):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="common.pt: can't be read"):
            read_plain(path, ("step",))
    assert torch.serialization.get_safe_globals()


class ByName:
    """What Python 3.11.0 to 3.11.3 make of an enumeration's member, and what a stranger could make of it."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return (getattr, self.call)


def test_an_enumeration_pickled_by_name_is_read():
    """Debian 12's own Python writes .metadata so: every checkpoint made with it would be refused as damaged."""
    member = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    stored = pickle.dumps(ByName(_MEM_FORMAT_ENCODING, member.name))
    assert _IndexReader(io.BytesIO(stored)).load() is member


@pytest.mark.parametrize("call", [(_MEM_FORMAT_ENCODING, "__init__"), (Metadata, "__init__")])
def test_any_other_attribute_is_refused(call):
    """getattr on a class leads to everything that Python can do."""
    with pytest.raises(pickle.UnpicklingError, match="is not allowed"):
        _IndexReader(io.BytesIO(pickle.dumps(ByName(*call)))).load()
