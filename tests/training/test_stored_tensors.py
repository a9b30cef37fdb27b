"""Checkpoints read tensor by tensor: the same weights as the training code's own loader, whatever layout wrote them."""

import pickle
import shutil

import pytest
import torch
from helpers.tiny_run import tiny_config, train_here
from helpers.worlds import run_world
from torch.distributed.checkpoint.metadata import MetadataIndex

from miras_megatron.training.checkpoint_folder import find_checkpoint
from miras_megatron.training.generate import open_model
from miras_megatron.training.plain_files import read_places
from miras_megatron.training.stored_tensors import StoredTensors, write_tensors

WHAT_IS_NO_WEIGHT = {"optimizer", "random", "lane"}


def assert_same_as_loaded(run):
    stored = StoredTensors(find_checkpoint(run, "RUN"))
    with open_model(run) as opened:
        loaded = {name: x for name, x in opened.model.state_dict().items() if isinstance(x, torch.Tensor)}
    assert {name for name in loaded if loaded[name].numel()} == set(stored.weights)
    for name in stored.weights:
        tensor = stored.read(name)
        assert tensor.dtype == stored.dtype(name) and tuple(tensor.shape) == stored.shape(name)
        assert torch.equal(tensor, loaded[name]), name


def test_one_rank(trained_run):
    """An export starts here."""
    assert_same_as_loaded(trained_run)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["tensor", "pipeline", "context"])
def test_two_ranks(split, tmp_path):
    """A tensor put together wrongly from its ranks' parts, or half a model, would be exported without a word."""
    changes = {f"parallel__{split}": 2, "training__steps": 1, "training__global_batch": 4, "model__block": "lmm"}
    run_world(2, train_here, tiny_config(tmp_path, **changes))
    assert_same_as_loaded(tmp_path / "run")


def test_moments_are_no_weights(trained_run):
    """They'd double a model's size, under names nobody knows."""
    stored = StoredTensors(find_checkpoint(trained_run, "RUN"))
    others = set(stored.names) - set(stored.weights)
    assert {name.split(".")[0].rstrip("0123456789") for name in others} <= WHAT_IS_NO_WEIGHT


def test_what_is_written_is_read_again(tmp_path):
    """By the same reader, dtypes and all; a scalar and an empty tensor too."""
    tensors = {
        "a": torch.randn(3, 4),
        "b": torch.randn(5).to(torch.bfloat16),
        "c": torch.tensor(1.5),
        "d": torch.zeros(0, 2),
    }
    write_tensors(tmp_path, tensors.items())
    stored = StoredTensors(tmp_path)
    assert stored.names == list(tensors)
    assert all(torch.equal(stored.read(name), x) and stored.dtype(name) == x.dtype for name, x in tensors.items())


class Bomb:
    def __reduce__(self):
        return print, ("ran",)


def break_file(folder, how):
    path = folder / "__0_0.distcp"
    content = path.read_bytes()
    _, places = read_places(folder)
    place = places[MetadataIndex("a", torch.Size([0, 0]))]
    if how == "cut off":
        path.write_bytes(content[: place.offset + place.length // 2])
    elif how == "gone":
        path.unlink()
    elif how == "another tensor":
        torch.save(torch.zeros(2, 2), path)
    elif how == "code":
        with open(path, "wb") as file:
            torch.save(Bomb(), file)


@pytest.mark.parametrize("how", ["cut off", "gone", "another tensor", "code"])
def test_a_damaged_file_is_told(how, tmp_path, capsys):
    """One message with the file's name; code in a stranger's checkpoint doesn't run."""
    write_tensors(tmp_path, [("a", torch.randn(30, 40))])
    break_file(tmp_path, how)
    with pytest.raises(ValueError, match="damaged checkpoint: .*a: .*__0_0.distcp"):
        StoredTensors(tmp_path).read("a")
    assert "ran" not in capsys.readouterr().out


def test_an_index_that_points_elsewhere_is_refused(tmp_path):
    """Otherwise a checkpoint could make an export read any file of this machine."""
    inner = tmp_path / "inner"
    inner.mkdir()
    write_tensors(inner, [("a", torch.randn(3, 4))])
    shutil.copy(inner / "__0_0.distcp", tmp_path)
    with open(inner / ".metadata", "rb") as file:
        index = pickle.load(file)
    for place in index.storage_data.values():
        place.relative_path = "../__0_0.distcp"
    with open(inner / ".metadata", "wb") as file:
        pickle.dump(index, file)
    with pytest.raises(ValueError, match="doesn't say where"):
        StoredTensors(inner).read("a")
