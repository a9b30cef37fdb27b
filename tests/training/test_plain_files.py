"""What of a checkpoint is unpickled: nothing that runs anybody's code."""

import io
import os
import pickle
import resource

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, Metadata

from miras_megatron.training.plain_files import _IndexReader, read_index, read_plain, write_plain
from miras_megatron.training.stored_tensors import write_tensors


class Bomb:
    def __reduce__(self):
        return os.system, ("touch /tmp/never",)


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
