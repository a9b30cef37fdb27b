"""miras-inspect: if it were wrong, people would take damaged checkpoints for good ones, or two models for the same."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from helpers.tiny_run import tiny_config
from miras_tools.hf_names import VOCABULARY
from miras_tools.inspect_weights import _apart, main
from safetensors.torch import load_file, save_file

from miras_megatron.training.checkpoint_folder import find_checkpoint
from miras_megatron.training.generate import open_model
from miras_megatron.training.main import main as train
from miras_megatron.training.plain_files import read_places
from miras_megatron.training.stored_tensors import StoredTensors


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
    for words in (
        "export of format 1",
        "layers mcgwa, hidden 16",
        "rule titans",
        "257 tokens, 320 rows",
        "2,016 of them in rows beyond",
    ):
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


def test_settings_that_nobody_wrote_down_are_not_compared(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """save_pretrained leaves training_config.yaml out: defaults told as the other's settings would be made up."""
    other = Path(shutil.copytree(exported, tmp_path / "other"))
    (other / "training_config.yaml").unlink()
    assert main(["--diff", str(exported), str(other)]) == 0
    said = capsys.readouterr().out
    assert f"{other} has no training_config.yaml: only the model and its weights are compared" in said
    assert "training.steps" not in said and "data." not in said


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


@pytest.mark.parametrize(
    ("was", "now", "code"), [(0.0, -0.0, 1), (1.0, float("nan"), 1), (float("nan"), float("nan"), 0)]
)
def test_the_same_means_the_same_bits(was: float, now: float, code: int) -> None:
    """A zero of the other sign is another folder to a digest; what is no number is equal to its like alone."""
    found = _apart("weight", torch.tensor([2.0, was]), torch.tensor([2.0, now]))
    assert (found["difference"] != 0.0) == bool(code) and not math.isnan(found["difference"])


def copied(folder: Path, place: Path) -> Path:
    return Path(shutil.copytree(folder, place))


def test_an_export_that_lacks_a_tensor_is_no_whole_one(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers would draw it at random, and only warn."""
    other = copied(exported, tmp_path / "other")
    index = json.loads((other / "model.safetensors.index.json").read_text())
    file = other / index["weight_map"].pop("model.norm.weight")
    (other / "model.safetensors.index.json").write_text(json.dumps(index))
    tensors = load_file(file)
    tensors["model.more.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    assert main([str(other)]) == 1
    told = capsys.readouterr().err
    assert "model.norm.weight is missing" in told and "model.more.weight is no weight of this model" in told


def test_torn_files_are_damage_and_the_rest_is_told(
    trained: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy that broke off: code 1, every finding, and what can still be read."""
    other = copied(exported, tmp_path / "export")
    shards = sorted(other.glob("model-*.safetensors"))
    shards[0].write_bytes(shards[0].read_bytes()[:-9])
    shards[1].unlink()
    run = copied(find_checkpoint(trained, "RUN"), tmp_path / "checkpoint")
    stored, (_, places) = StoredTensors(run), read_places(run)
    weights = sorted((x.relative_path, x.offset) for at, x in places.items() if at.fqn in stored.weights)
    name, end = weights[len(weights) // 2]
    (run / name).write_bytes((run / name).read_bytes()[:end])
    for folder, signs in {other: [shards[0].name, shards[1].name], run: ["were written", "can't be read"]}.items():
        assert main([str(folder), "--tensors"]) == 1
        said = capsys.readouterr()
        assert all(sign in said.err for sign in signs), said.err
        assert said.out.count("float32") > 3
        assert main(["--diff", str(trained), str(folder)]) == 1
        assert all(sign in capsys.readouterr().err for sign in signs[:1])


def test_padding_rows_are_looked_at_too(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They count in the softmax of whoever trains on."""
    other = copied(exported, tmp_path / "other")
    tensors = load_file(other / "padding.safetensors")
    for change, words in {
        (lambda x: x + torch.nan): [str(other)],
        (lambda x: x + 1): ["--diff", str(exported), str(other)],
        (lambda x: x[1:]): [str(other)],
    }.items():
        save_file({n: change(x).contiguous() for n, x in tensors.items()}, other / "padding.safetensors")
        assert main(words) == 1
    said = capsys.readouterr()
    assert "padding.safetensors" in said.err and "apart, all in rows beyond the vocabulary" in said.out
    (other / "padding.safetensors").unlink()
    assert main(["--diff", str(exported), str(other)]) == 0


def test_the_same_weights_are_another_model_in_other_chunks(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a memory computes hangs on its chunks; what a run was called doesn't matter."""
    other = copied(exported, tmp_path / "other")
    (other / "training_config.yaml").unlink()
    config = json.loads((other / "config.json").read_text())
    for changed, code in {"seed": 0, "chunk_size": 1}.items():
        config["block"][changed] = 4
        (other / "config.json").write_text(json.dumps(config))
        assert main(["--diff", str(exported), str(other)]) == code, changed
    assert "another model: chunk_size 8 | 4" in capsys.readouterr().out


def test_a_larger_vocabulary_is_another_model(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows that only one has are no padding where they are tokens."""
    other = copied(exported, tmp_path / "other")
    (other / "padding.safetensors").unlink()
    for path in other.glob("model-*.safetensors"):
        tensors = load_file(path)
        more = {n: torch.cat([x, x[:3]]) for n, x in tensors.items() if n in VOCABULARY}
        save_file(tensors | more, path, metadata={"format": "pt"})
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 260}))
    assert main(["--diff", str(exported), str(other)]) == 1
    said = capsys.readouterr().out
    assert "vocab_size 257 | 260" in said and "shapes [320, 16] and [260, 16]" in said


def test_what_is_no_number_is_null_in_json(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """NaN isn't JSON: most readers refuse the whole of it, just where a model is broken."""

    def no_constant(name: str) -> None:
        raise AssertionError(name)

    other = copied(exported, tmp_path / "other")
    path = sorted(other.glob("model-*.safetensors"))[0]
    tensors = load_file(path)
    name = next(iter(tensors))
    tensors[name].view(-1)[0] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    assert main([str(other), "--json"]) == 1
    said = json.loads(capsys.readouterr().out, parse_constant=no_constant)
    (row,) = [row for row in said["tensors"] if not row["finite"]]
    assert row["norm"] is None and row["largest"] is None
    assert main(["--diff", str(exported), str(other), "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out, parse_constant=no_constant)["tensors"]
    assert row["difference"] is None


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
