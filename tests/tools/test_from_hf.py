"""miras-from-hf: what was exported comes back bit for bit, and trains and generates on."""

import json
import os
import shutil

import pytest
import torch
from helpers.tiny_run import records, tiny_config
from miras_tools import from_hf, hf_import
from miras_tools.hf_shapes import weight_dtypes
from miras_tools.safetensors_stream import INDEX
from miras_tools.to_hf import main as to_hf
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from miras_megatron.config.load import load_run
from miras_megatron.model.build import block_spec
from miras_megatron.training.checkpoint_folder import find_checkpoint
from miras_megatron.training.generate import main as generate
from miras_megatron.training.main import main as train
from miras_megatron.training.stored_tensors import StoredTensors


@pytest.fixture(scope="module")
def imported(exported, tmp_path_factory):
    folder = tmp_path_factory.mktemp("imported") / "run"
    assert from_hf.main([str(exported), str(folder)]) == 0
    return folder


@pytest.fixture
def copy(exported, tmp_path):
    """An export to break."""
    return shutil.copytree(exported, tmp_path / "copy")


@pytest.fixture
def tied(tmp_path):
    """An export of a run whose output layer is its embedding."""
    argv = tiny_config(tmp_path / "tied", training__steps=1, checkpoint__every=1)
    assert train(argv) == 0
    assert to_hf([str(tmp_path / "tied" / "run"), str(tmp_path / "tied" / "model"), "--no-check"]) == 0
    return tmp_path / "tied" / "model"


def test_tied_embeddings_there_and_back_and_there_again(tied, tmp_path):
    """One tensor is two in the model: written twice, or not at all, it wouldn't load."""
    with safe_open(tied / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" not in file.keys() and "model.embed_tokens.weight" in file.keys()
    assert from_hf.main([str(tied), str(tmp_path / "run")]) == 0
    assert to_hf([str(tmp_path / "run"), str(tmp_path / "again"), "--no-check"]) == 0
    for name in ("model.safetensors", "padding.safetensors", "config.json"):
        assert (tied / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_there_and_back_and_there_again(exported, imported, tmp_path):
    """Whoever fine-tunes elsewhere and comes back must not lose a bit on the way."""
    again = tmp_path / "again"
    assert to_hf([str(imported), str(again), "--no-check", "--max-shard-size", "20KB"]) == 0
    files = [path for path in exported.iterdir() if "safetensors" in path.name]
    assert len(files) > 3
    for path in [*files, exported / "config.json", exported / "tokenizer.json"]:
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name


def test_the_same_weights_as_the_original(trained, imported):
    """Padding rows too: they count in the softmax."""
    was, now = (StoredTensors(find_checkpoint(run, "RUN")) for run in (trained, imported))
    assert set(was.weights) == set(now.names)
    assert all(torch.equal(was.read(name), now.read(name)) for name in was.weights)


def test_a_run_from_an_import_starts_with_the_original_loss(trained, imported, tmp_path):
    """The proof that training sees the same model."""
    losses = []
    for number, start in enumerate((trained, imported)):
        run = tmp_path / str(number)
        data = load_run([str(trained / "config.yaml")]).data.train
        words = [f"--training.init_from={start}", f"--run.dir={run}", "--training.steps=1", f"--data.train={data}"]
        assert train([str(start / "config.yaml"), *words]) == 0
        losses.append(records(run)[0]["loss"])
    assert losses[0] == losses[1]


def test_an_import_generates(imported, capsys):
    """The shortest way to see that it is alive."""
    assert generate([str(imported), "--prompt", "the memory", "--max-new", "3", "--temperature", "0"]) == 0
    assert capsys.readouterr().out


def test_what_save_pretrained_leaves_out_is_said(trained, copy, tmp_path, capsys):
    """It writes neither our configuration nor the padding: the model is whole, but not all is as it was."""
    (copy / "training_config.yaml").unlink()
    (copy / "padding.safetensors").unlink()
    assert from_hf.main([str(copy), str(tmp_path / "run")]) == 0
    told = capsys.readouterr().out
    assert "training_config.yaml isn't there" in told and "rows beyond the vocabulary are zero" in told
    run, was = (load_run([str(folder / "config.yaml")]) for folder in (tmp_path / "run", trained))
    assert block_spec(run) == block_spec(was) and run.model.letters == was.model.letters
    stored = StoredTensors(find_checkpoint(tmp_path / "run", "RUN"))
    assert not stored.read("output_layer.weight")[257:].any()


def test_tied_models_that_transformers_4_saved(tied, tmp_path):
    """It leaves out of config.json what is its own default, tie_word_embeddings = true among it."""
    config = json.loads((tied / "config.json").read_text())
    del config["tie_word_embeddings"]
    (tied / "config.json").write_text(json.dumps(config))
    assert from_hf.main([str(tied), str(tmp_path / "run")]) == 0
    assert load_run([str(tmp_path / "run" / "config.yaml")]).model.tie_embeddings


ODD = {
    "vocab_size": ["257", None],
    "num_attention_heads": [0],
    "rms_norm_eps": ["a", float("nan")],
    "max_position_embeddings": [None, -5],
    "miras_format": [float("inf"), "new"],
    "pattern": [7],
    "rule": [None],
    "block.seed": ["x"],
    "block.rope_base": ["x"],
}
"""Field of config.json -> values that mean no model."""


@pytest.mark.parametrize("name", ODD)
def test_values_that_mean_no_model(name, copy, tmp_path, capsys):
    """A slip in a file that people edit by hand: a message, not a traceback, nor a run folder that nobody can open."""
    (copy / "training_config.yaml").unlink()
    whole = json.loads((copy / "config.json").read_text())
    for value in ODD[name]:
        first, _, inner = name.partition(".")
        changed = {first: whole[first] | {inner: value} if inner else value}
        (copy / "config.json").write_text(json.dumps(whole | changed))
        assert "config.json" in refused(capsys, copy, tmp_path), value


def test_a_size_of_the_tokenizer_that_is_none(copy, tmp_path, capsys):
    """The tokenizer itself is asked; this is only what it is compared with."""
    edit(copy / "config.json", tokenizer_size=[1])
    content = json.loads((copy / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 257, "content": "<|more|>"})
    (copy / "tokenizer.json").write_text(json.dumps(content))
    assert "the model is of 257 or [1]" in refused(capsys, copy, tmp_path)


def change_weights(folder, change):
    """Every file of weights with each tensor as `change(name, tensor)` makes it."""
    for path in folder.glob("*.safetensors"):
        tensors = {name: change(name, tensor).contiguous() for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_memory_that_was_narrowed_elsewhere_trains_as_it_must(dtype, copy, tmp_path, capsys):
    """model.to(torch.bfloat16) and save_pretrained: steps of a memory in bf16 are rounded away, and nothing would say
    so. What was kept wide is written as it is."""
    change_weights(copy, lambda name, x: x if name == "model.norm.weight" else x.to(dtype))
    assert from_hf.main([str(copy), str(tmp_path / "run")]) == 0
    stored = StoredTensors(find_checkpoint(tmp_path / "run", "RUN"))
    assert {stored.dtype(name) for name in stored.weights} == {torch.float32}
    told = capsys.readouterr().out
    assert "narrower there" in told and f"and {len(stored.weights) - 4} more" in told and "model.norm" not in told


def test_only_what_training_keeps_wide_is_widened(copy, tmp_path):
    """A bf16 run's projections are bf16: float32 would double the checkpoint and change its export."""
    text = (copy / "training_config.yaml").read_text()
    (copy / "training_config.yaml").write_text(text.replace("precision: fp32", "precision: bf16"))
    edit(copy / "config.json", dtype="bfloat16")
    change_weights(copy, lambda name, x: x.to(torch.bfloat16))
    assert from_hf.main([str(copy), str(tmp_path / "run")]) == 0
    stored = StoredTensors(find_checkpoint(tmp_path / "run", "RUN"))
    assert {name: stored.dtype(name) for name in stored.weights} == weight_dtypes(
        load_run([str(tmp_path / "run" / "config.yaml")])
    )


@pytest.mark.parametrize("part", ["core.weights", "lm_head"])
def test_weights_that_are_no_numbers_are_refused(part, copy, tmp_path, capsys):
    """They came from a training that broke elsewhere; a run from them is lost from its first step."""
    name = next(x for x in json.loads((copy / INDEX).read_text())["weight_map"] if part in x)

    def broken(found, tensor):
        if found == name:
            tensor.view(-1)[-1] = torch.nan
        return tensor

    change_weights(copy, broken)
    told = refused(capsys, copy, tmp_path)
    assert f"{name} holds values that are not finite" in told


def test_a_strangers_folders_are_not_taken_over(copy, tmp_path):
    """A start or a cache in a folder of whoever trained it: at best it isn't there, at worst it is another's."""
    text = (copy / "training_config.yaml").read_text()
    (copy / "training_config.yaml").write_text(
        text.replace("init_from: null", "init_from: /srv/theirs").replace("cache: null", "cache: /srv/theirs")
    )
    assert from_hf.main([str(copy), str(tmp_path / "run")]) == 0
    for path in (tmp_path / "run").rglob("config.yaml"):
        assert "theirs" not in path.read_text()


def refused(capsys, copy, tmp_path):
    """What the command says when it refuses; nothing is left."""
    target = tmp_path / "run"
    assert from_hf.main([str(copy), str(target)]) == 2
    assert not target.exists() and not list(tmp_path.glob(".run*"))
    told = capsys.readouterr().err
    assert told.count("miras-from-hf:") == 1 and "Traceback" not in told
    return told


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_shard_that_was_cut_off(copy, tmp_path, capsys):
    """A download that broke."""
    shard = sorted(copy.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-7])
    told = refused(capsys, copy, tmp_path)
    assert shard.name in told and "cut off" in told


def test_a_shard_that_may_not_be_read(copy, tmp_path, capsys, monkeypatch):
    """Another user's file: copied again it is as it was, and safetensors says that there is none."""
    shard = sorted(copy.glob("model-*.safetensors"))[1]
    shard.chmod(0)
    allowed, really = os.access, hf_import.safe_open
    monkeypatch.setattr(os, "access", lambda path, mode: path != shard and allowed(path, mode))

    def as_another_user(path, **options):
        if path == shard:
            raise FileNotFoundError(f"No such file or directory: {path}")
        return really(path, **options)

    monkeypatch.setattr(hf_import, "safe_open", as_another_user)
    told = refused(capsys, copy, tmp_path)
    assert shard.name in told and "Permission denied" in told and "No such file" not in told


def test_a_shard_that_is_missing(copy, tmp_path, capsys):
    """A download that was never finished."""
    shard = sorted(copy.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert f"names {shard.name}, which isn't there" in refused(capsys, copy, tmp_path)


def test_no_weights_at_all(copy, tmp_path, capsys):
    """A folder of which only the small files were fetched."""
    for path in copy.glob("model*"):
        path.unlink()
    assert "model.safetensors" in refused(capsys, copy, tmp_path)


def test_a_newer_format(copy, tmp_path, capsys):
    """Read by an older program it could only be misread."""
    edit(copy / "config.json", miras_format=2)
    assert "update miras-megatron" in refused(capsys, copy, tmp_path)


def test_another_model(copy, tmp_path, capsys):
    """Any folder can be named."""
    edit(copy / "config.json", model_type="llama")
    assert "'llama'" in refused(capsys, copy, tmp_path)


def test_a_tokenizer_of_another_size(copy, tmp_path, capsys):
    """Its ids mean other rows."""
    content = json.loads((copy / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 257, "content": "<|more|>"})
    (copy / "tokenizer.json").write_text(json.dumps(content))
    assert "a tokenizer of 258 tokens, the model is of 257" in refused(capsys, copy, tmp_path)


def test_weights_of_another_shape(copy, tmp_path, capsys):
    """Two exports mixed up."""
    path = sorted(copy.glob("model-*.safetensors"))[0]
    with safe_open(path, framework="pt") as file:
        name = sorted(file.keys())[0]
    tensors = load_file(path)
    save_file(tensors | {name: torch.zeros(1, 2)}, path, metadata={"format": "pt"})
    told = refused(capsys, copy, tmp_path)
    assert name in told and "doesn't fit its config.json" in told


def test_configurations_that_contradict_each_other(copy, tmp_path, capsys):
    """One of the two was edited; the weights may fit both, and mean another model."""
    block = json.loads((copy / "config.json").read_text())["block"]
    edit(copy / "config.json", block=block | {"chunk_size": 4})
    assert "chunk_size is 8, not 4" in refused(capsys, copy, tmp_path)


def test_a_run_folder_that_is_another_runs(copy, imported, capsys):
    """A run's checkpoints are never mixed with an import's."""
    assert from_hf.main([str(copy), str(imported)]) == 2
    assert "is not empty" in capsys.readouterr().err
