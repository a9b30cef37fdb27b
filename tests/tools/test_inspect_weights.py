"""miras-inspect: if it were wrong, people would take damaged checkpoints for good ones, or two models for the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.tiny_run import tiny_config
from miras_tools.inspect_weights import main
from safetensors.torch import load_file, save_file

from miras_megatron.training.checkpoint_folder import find_checkpoint
from miras_megatron.training.generate import open_model
from miras_megatron.training.main import main as train


def test_every_tensor_of_a_checkpoint_is_told(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names, shapes, norms and counts are the model's own."""
    assert main([str(trained), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    with open_model(trained) as opened:
        want = {name: p.detach() for name, p in opened.model.named_parameters()}
    assert {row["name"]: row["shape"] for row in said["tensors"]} == {n: list(p.shape) for n, p in want.items()}
    for row in said["tensors"]:
        assert row["norm"] == pytest.approx(float(want[row["name"]].double().norm()), rel=1e-12)
        assert row["largest"] == float(want[row["name"]].abs().max())
    assert said["facts"]["parameters"] == sum(p.numel() for p in want.values())
    assert sum(part["numbers"] for part in said["parts"]) == said["facts"]["parameters"]
    assert said["problems"] == [] and said["state_bytes"] > 0


def test_an_export_is_told_in_words(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a person wants to know of a folder from a stranger: sizes, layers, state, parts."""
    assert main([str(exported)]) == 0
    said = capsys.readouterr().out
    for words in ("export of format 1", "layers mcgwa, hidden 16", "rule titans", "257 tokens, 320 rows"):
        assert words in said
    assert "full attention's cache grows" in said and "layer c" in said and "embedding" in said


def test_a_run_and_its_export_are_the_same(trained: Path, exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To the last bit, whatever the names there."""
    assert main(["--diff", str(trained), str(exported)]) == 0
    said = capsys.readouterr().out
    assert "tensors are the same to the last bit" in said and "apart" not in said


def test_a_changed_weight_and_a_changed_field_are_found(
    trained: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One number of one tensor, and how far it is off."""
    other = tmp_path / "other"
    shutil.copytree(exported, other)
    for path in other.glob("model-*.safetensors"):
        tensors = load_file(path)
        if "model.norm.weight" in tensors:
            tensors["model.norm.weight"][3] *= 1.5
            save_file(tensors, path, metadata={"format": "pt"})
    text = (other / "training_config.yaml").read_text(encoding="utf-8")
    (other / "training_config.yaml").write_text(text.replace("steps: 2\n", "steps: 3\n"), encoding="utf-8")
    assert main(["--diff", str(trained), str(other), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    (row,) = said["tensors"]
    assert row["name"] == "decoder.final_layernorm.weight" and 0.05 < row["difference"] < 0.3
    assert said["fields"]["training.steps"] == ["2", "3"] and said["only"] == {k: [] for k in said["only"]}


def test_models_of_other_shapes_differ(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layers that only one has, and tensors of other sizes, are named."""
    argv = tiny_config(tmp_path, model__ffn=48, training__steps=1, checkpoint__every=1)
    assert train(argv) == 0
    assert main(["--diff", str(trained), str(tmp_path / "run")]) == 1
    said = capsys.readouterr().out
    assert "only in" in said and "shapes [64, 16] and [96, 16]" in said


def test_damage_ends_with_code_1(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bit that fell over on a disk, and a weight that is not a number."""
    folder = tmp_path / "copy"
    shutil.copytree(find_checkpoint(trained, "RUN"), folder)
    path = next(folder.glob("__0_*.distcp"))
    with open(path, "r+b") as file:
        file.seek(-8, 2)
        file.write(b"damaged!")
    assert main([str(folder), "--tensors"]) == 1
    assert "SHA-256" in capsys.readouterr().err


def test_what_is_not_finite_is_named(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever is given such a model finds the layer."""
    other = tmp_path / "other"
    shutil.copytree(exported, other)
    path = sorted(other.glob("model-*.safetensors"))[-1]
    tensors = load_file(path)
    name = next(iter(tensors))
    tensors[name].view(-1)[0] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    assert main([str(other)]) == 1
    assert "not finite" in capsys.readouterr().err


def test_bad_input_ends_with_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback for a wrong path, an empty folder or half a command."""
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    for path in (tmp_path / "none", tmp_path):
        assert main([str(path)]) == 2
        assert "miras-inspect: " in capsys.readouterr().err
    for words in ([], ["--diff", "a"]):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 2
