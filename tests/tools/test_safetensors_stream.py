"""The stream writer against the library's reader."""

import json

import pytest
import torch
from miras_tools.safetensors_stream import Entry, plan_shards, write_file, write_shards
from safetensors import safe_open

TENSORS = {
    "odd": torch.arange(7, dtype=torch.float32).to(torch.bfloat16),
    "wide": torch.randn(3, 5),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
    "turned": torch.randn(4, 6).T,
    "double": torch.randn(2, dtype=torch.float64),
}
ENTRIES = [Entry(name, x.dtype, tuple(x.shape)) for name, x in TENSORS.items()]


def test_the_library_reads_what_was_written(tmp_path):
    """If not, nobody can load an export."""
    write_file(tmp_path / "x.safetensors", ENTRIES, TENSORS.__getitem__)
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(TENSORS)
        assert file.metadata() == {"format": "pt"}
        assert all(torch.equal(file.get_tensor(name), x) for name, x in TENSORS.items())


def test_tensors_lie_at_multiples_of_their_width(tmp_path):
    """A float32 behind seven bf16 would lie at 14 bytes, where some readers fail and others copy."""
    write_file(tmp_path / "x.safetensors", ENTRIES, TENSORS.__getitem__)
    data = (tmp_path / "x.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert (8 + length) % 8 == 0
    assert all(header[entry.name]["data_offsets"][0] % entry.dtype.itemsize == 0 for entry in ENTRIES)


@pytest.mark.parametrize("limit, count", [(1, 6), (60, 5), (10**9, 1)])
def test_shards_keep_to_the_limit(tmp_path, limit, count):
    """Hubs and file systems refuse larger files; only a tensor that is larger by itself may be."""
    names = write_shards(tmp_path, ENTRIES, TENSORS.__getitem__, limit)
    assert len(names) == count == len(list(tmp_path.glob("*.safetensors")))
    for shard in plan_shards(ENTRIES, limit):
        assert len(shard) == 1 or sum(entry.nbytes for entry in shard) <= limit
    if count > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in TENSORS.values())
        for name, file in index["weight_map"].items():
            with safe_open(tmp_path / file, framework="pt") as shard:
                assert torch.equal(shard.get_tensor(name), TENSORS[name])
