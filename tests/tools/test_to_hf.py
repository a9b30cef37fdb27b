"""miras-to-hf: the folder holds the model that was trained, all of it, or nothing is there."""

import errno
import io
import json
import shutil
import subprocess
import sys
import weakref
from dataclasses import replace
from fnmatch import fnmatch

import pytest
import torch
from helpers.models import small_run
from helpers.tiny_run import tiny_config, train_here
from helpers.worlds import run_world
from miras_tools import from_hf, hf_check, hf_hub, hf_weights, to_hf
from miras_tools.hf_card import write_card
from miras_tools.hf_code import flat_sources
from miras_tools.hf_hub import push
from miras_tools.hf_names import VOCABULARY, to_ours
from safetensors import safe_open

from miras_megatron.config.describe import dump_run
from miras_megatron.config.load import load_run
from miras_megatron.layers.block_spec import BlockSpec
from miras_megatron.memory import make_rule
from miras_megatron.model.build import block_spec
from miras_megatron.training.checkpoint_folder import find_checkpoint, retire
from miras_megatron.training.generate import open_model
from miras_megatron.training.stored_tensors import StoredTensors


def read_all(folder):
    tensors = {}
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}
    return tensors


def test_the_folder_holds_the_trained_weights(trained, exported):
    """Bit for bit, without the rows that are no tokens; those are kept apart."""
    found = read_all(exported)
    with open_model(trained) as opened:
        want = {name: x for name, x in opened.model.state_dict().items() if isinstance(x, torch.Tensor) and x.numel()}
    assert {to_ours(name) for name in found} == set(want)
    with safe_open(exported / "padding.safetensors", framework="pt") as file:
        padding = {name: file.get_tensor(name) for name in VOCABULARY}
    for name, tensor in found.items():
        whole = torch.cat([tensor, padding[name]]) if name in VOCABULARY else tensor
        assert torch.equal(whole, want[to_ours(name)]), name
    assert found["lm_head.weight"].shape == (257, 16) and padding["lm_head.weight"].shape == (63, 16)


def test_the_configuration_builds_the_same_blocks(trained, exported):
    """The modeling file builds its layers from config.json alone: one other number is another model."""
    config = json.loads((exported / "config.json").read_text())
    rule = make_rule(config["rule"]["name"], **config["rule"]["choices"])
    sizes = {"hidden": config["hidden_size"], "heads": config["num_attention_heads"]}
    built = BlockSpec(
        **sizes, norm_eps=config["rms_norm_eps"], layers=config["num_hidden_layers"], rule=rule, **config["block"]
    )
    assert built == block_spec(load_run([str(trained / "config.yaml")]))
    assert config["pattern"] == "mcgwa" and config["max_position_embeddings"] == 24
    assert set(config["state_shapes"]) == set("mcgwa")
    assert all(shape[0] == 1 for shapes in config["state_shapes"].values() for shape in shapes.values())


def test_nothing_of_this_machine_is_in_the_folder(trained, exported):
    """An export goes to strangers: the run's folder, and the paths of its caches, are nobody's business."""
    for name in ("config.json", "README.md", "training_config.yaml"):
        assert str(trained) not in (exported / name).read_text(), name


def test_a_run_is_told_without_its_paths(tmp_path):
    """Names of users and of unpublished data lie in paths, and --push publishes what is written."""
    run = small_run("m")
    secret = "/home/alice/secret"
    data = replace(run.data, train=[f"0.3 {secret}/books", f"{secret}/a b"], validation=f"2 {secret}/news")
    data = replace(data, tokenizer=f"{secret}/tokenizer.json", cache=secret)
    run = replace(run, data=data, training=replace(run.training, init_from=f"{secret}/run"))
    public = to_hf.public_form(replace(run, run=replace(run.run, dir=f"{secret}/runs/book")))
    assert "alice" not in dump_run(public)
    assert public.data.train == ["0.3 books", "a b"] and public.data.validation == "2 news"
    assert public.data.tokenizer == "tokenizer.json" and to_hf.public_form(small_run("m")).data.train == "shipped"
    write_card(tmp_path, run, public, 3, False)
    assert "alice" not in (tmp_path / "README.md").read_text()


def test_the_code_needs_nothing_of_ours(exported):
    """A sibling that is missing, or an absolute import, and the model can't be loaded anywhere else."""
    assert all((exported / name).read_text() == text for name, text in flat_sources().items())
    named = (exported / "modeling_miras.py").read_text()
    assert all(f"from .{name.removesuffix('.py')} import" in named for name in flat_sources())
    assert not list(exported.glob("__init__.py")) and not [path for path in exported.iterdir() if path.is_dir()]


def test_tensors_are_read_one_at_a_time(trained, tmp_path, monkeypatch):
    """A model of the size of the memory couldn't be exported if two tensors were held at once."""
    alive, most = [], []
    read = StoredTensors.read

    def counted(self, name):
        most.append(sum(ref() is not None for ref in alive))
        tensor = read(self, name)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(StoredTensors, "read", counted)
    checkpoint = find_checkpoint(trained, "RUN")
    run = to_hf.saved_run(checkpoint)
    hf_weights.ExportedWeights(StoredTensors(checkpoint), run).write(tmp_path, 10**9)
    assert max(most) <= 1 and len(most) == len(StoredTensors(checkpoint).weights)


# -- bad input: code 2, one message, nothing left ------------------------------------------------------


def refused(capsys, tmp_path, *argv):
    """What the command says when it refuses."""
    target = tmp_path / "target"
    assert to_hf.main([*map(str, argv[:1]), str(target), "--no-check", *map(str, argv[1:])]) == 2
    assert not target.exists() and not list(tmp_path.glob(".target*"))
    told = capsys.readouterr().err
    assert told.count("miras-to-hf:") == 1 and "Traceback" not in told
    return told


def test_no_checkpoint(capsys, tmp_path):
    """The commonest slip: a path with a letter missing."""
    assert "does not exist" in refused(capsys, tmp_path, tmp_path / "nowhere")


def test_a_damaged_checkpoint(capsys, tmp_path, trained):
    """A file that was cut while being copied would export as noise."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    file = find_checkpoint(run, "RUN") / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])
    assert "damaged checkpoint" in refused(capsys, tmp_path, run)


def test_a_checkpoint_that_a_run_removes_meanwhile(capsys, tmp_path, trained, monkeypatch):
    """checkpoint.keep of a run that trains on: "damaged, take an earlier one" sends its user to what is gone, too."""
    shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("tb"))
    monkeypatch.setattr(to_hf, "refuse_small_disk", lambda *args: retire(find_checkpoint(tmp_path / "run", "RUN")))
    assert to_hf.main([str(tmp_path / "run"), str(tmp_path / "target"), "--no-check"]) == 2
    told = capsys.readouterr().err
    assert "was removed while it was read" in told and "export again" in told and "damaged" not in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_another_tokenizer(capsys, tmp_path, trained):
    """Its ids mean other rows."""
    from miras_megatron.training.tokenizer import train_bpe

    train_bpe(iter(["words and words"]), 260, tmp_path / "tokenizer.json")
    told = refused(capsys, tmp_path, trained, "--tokenizer", tmp_path / "tokenizer.json")
    assert "--tokenizer" in told and "was trained with digest" in told


def test_a_target_with_something_in_it(capsys, trained, exported):
    """Two models' files in one folder."""
    before = sorted(path.name for path in exported.iterdir())
    assert to_hf.main([str(trained), str(exported), "--no-check"]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert sorted(path.name for path in exported.iterdir()) == before


def test_a_full_disk_leaves_nothing(capsys, tmp_path, trained, monkeypatch):
    """Half an export looks like a whole one next week."""

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(to_hf, "write_code", full)
    assert "No space left" in refused(capsys, tmp_path, trained)


PROBES = {
    "torch 2.9\ntransformers\n": "pip install transformers,",
    "torch\ntransformers\n": "pip install torch transformers,",
    "torch 2.9\ntransformers 4.56.2\n": "pip install 'transformers>=4.57'",
    "torch 2.9\ntransformers 3.5.dev0\n": "transformers 4.57 or newer instead of 3.5.dev0",
}
"""What another interpreter says it has -> the way out."""


def test_a_check_without_transformers_is_refused_before_anything(capsys, tmp_path, trained, monkeypatch):
    """Not after an hour of writing."""
    for said, way_out in PROBES.items():
        answer = subprocess.CompletedProcess([], 0, stdout=said)
        monkeypatch.setattr(hf_check.subprocess, "run", lambda *args, answer=answer, **options: answer)
        assert to_hf.main([str(trained), str(tmp_path / "target")]) == 2
        told = capsys.readouterr().err
        assert way_out in told and "--no-check" in told, said
        assert not (tmp_path / "target").exists()


def test_an_interpreter_that_is_none_is_refused(monkeypatch):
    """A path with a letter missing, another program, and one that hangs on a file system that is gone."""
    for python, reason in {
        "/nowhere/python": "can't be started",
        sys.executable + "x": "can't be",
        "true": "no working",
    }.items():
        with pytest.raises(ValueError, match=f"--python {python}: .*{reason}"):
            hf_check.refuse_no_transformers(python)
    monkeypatch.setattr(hf_check, "PATIENCE", 0.001)
    with pytest.raises(ValueError, match="doesn't answer"):
        hf_check.refuse_no_transformers(sys.executable)


def test_the_other_interpreter_sees_what_its_user_installed(monkeypatch, tmp_path):
    """pip install --user is how many install on clusters; our own path, and files where one stands, stay out."""
    asked = []

    def stand_in(words, **options):
        asked.append((words, options))
        return subprocess.CompletedProcess(words, 0, stdout="torch 2.9\ntransformers 5.24.0\n")

    monkeypatch.setenv("PYTHONPATH", "somewhere")
    monkeypatch.setenv("PYTHONUSERBASE", "theirs")
    monkeypatch.setattr(hf_check.subprocess, "run", stand_in)
    hf_check.refuse_no_transformers("python")
    hf_check.save_file({"text": torch.zeros(1)}, tmp_path / "found.safetensors")
    hf_check._in_fresh_process(tmp_path, {}, tmp_path, "python")
    for words, options in asked:
        assert words[0].startswith("/") and not {"-I", "-s", "-E"} & set(words)
        assert "PYTHONPATH" not in options["env"] and options["env"]["PYTHONUSERBASE"] == "theirs"
    assert options["cwd"] == tmp_path and (tmp_path / "hf_check_worker.py").is_file()


@pytest.mark.parametrize("size", ["0", "-1GB", "five", "5XB"])
def test_a_size_that_is_none(size, capsys):
    """A typing error in a size must not become a million files."""
    with pytest.raises(SystemExit) as ended:
        to_hf.main(["run", "folder", f"--max-shard-size={size}"])
    assert ended.value.code == 2 and "must be a size" in capsys.readouterr().err


# -- the check --------------------------------------------------------------------------------------------


def test_the_check_covers_what_goes_wrong():
    """Shorter than a chunk, off its grid, and beyond whatever a layer sees at once."""
    assert hf_check.check_lengths(small_run("m")) == [3, 9, 19]
    assert hf_check.check_lengths(small_run("c", segment=60)) == [3, 9, 187]


def test_figures_are_told_apart():
    """A check that passes everything is worse than none."""
    x = torch.tensor([[1.0, -4.0]])
    assert hf_check.relative(x, x) == 0
    assert hf_check.relative(x, x + 4e-3) == pytest.approx(1e-3, rel=1e-3)
    assert hf_check.relative(x, torch.tensor([[1.0, float("nan")]])) == float("inf")
    assert hf_check.relative(x, x[:, :1]) == float("inf")


def test_greedy_texts_may_part_only_at_a_tie():
    """Two logits closer than rounding may change places; any other difference is another model."""
    logits = torch.tensor([[5.0, 1.0, 0.0], [0.0, 5.0, 5.0 - 1e-6], [0.0, 0.0, 5.0]])
    want = logits.argmax(-1)
    assert hf_check.judge_text(want, logits, want, 1e-5).good
    assert hf_check.judge_text(want, logits, torch.tensor([0, 2, 1]), 1e-5).good
    assert not hf_check.judge_text(want, logits, torch.tensor([1, 1, 2]), 1e-5).good
    assert not hf_check.judge_text(want, logits, want[:2], 1e-5).good


def test_a_difference_is_an_exit_code(capsys, trained, tmp_path, monkeypatch):
    """Scripts that push a model look at nothing else; and the folder stays, to be looked into."""
    finding = hf_check.Finding("logits of 3 tokens", "9.9e-01 of the largest apart", False)
    monkeypatch.setattr(to_hf, "refuse_no_transformers", lambda python: None)
    monkeypatch.setattr(to_hf, "compare", lambda *args: iter([finding]))
    assert to_hf.main([str(trained), str(tmp_path / "target"), "--push", "me/model"]) == 1
    out, err = capsys.readouterr()
    assert "FAIL logits of 3 tokens: 9.9e-01" in out and "stays" in err and "pushed" not in out
    assert (tmp_path / "target" / "model.safetensors").is_file()


def test_a_folder_that_cannot_be_loaded_or_pushed_is_said_to_be_there(capsys, trained, tmp_path, monkeypatch):
    """Code 2 means that nothing was written: a script would export again, and be refused for the folder."""
    died = subprocess.CompletedProcess([], -9, stdout="", stderr="")
    monkeypatch.setattr(to_hf, "refuse_no_transformers", lambda python: None)
    monkeypatch.setattr(hf_check, "_expected", lambda *args: {})
    monkeypatch.setattr(hf_check.subprocess, "run", lambda *args, **options: died)
    assert to_hf.main([str(trained), str(tmp_path / "a")]) == 1
    told = capsys.readouterr().err
    assert "exit code -9" in told and f"{tmp_path / 'a'} is written and stays" in told
    monkeypatch.setattr(hf_hub, "_client", lambda: Hub(RuntimeError("not allowed")))
    assert to_hf.main([str(trained), str(tmp_path / "b"), "--no-check", "--push", "me/model"]) == 1
    assert "not allowed" in capsys.readouterr().err and (tmp_path / "b" / "config.json").is_file()


def test_a_folder_that_cannot_be_announced_is_there(capsys, trained, tmp_path, monkeypatch):
    """Its log on a full disk, or a pager that was left: code 2 would say that nothing was written."""

    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    assert to_hf.main([str(trained), str(tmp_path / "target"), "--no-check"]) == 1
    assert "is written and stays" in capsys.readouterr().err and (tmp_path / "target" / "config.json").is_file()


def test_a_good_check_is_followed_by_the_push(trained, tmp_path, other_process, monkeypatch, capsys):
    """The two together are how a model is published."""
    hub = Hub()
    monkeypatch.setattr(hf_hub, "_client", lambda: hub)
    assert to_hf.main([str(trained), str(tmp_path / "target"), "--push", "me/model", "--private"]) == 0
    out = capsys.readouterr().out
    assert out.count("  ok ") == 4 and out.endswith("pushed to hub/me/model\n")
    assert [what for what, _ in hub.calls] == ["create_repo", "upload_folder"]


@pytest.fixture
def other_process(monkeypatch):
    """The check without transformers: what stands in for the other process finds what training said.

    Its argument is called there; `models` holds a reference to every training model that was opened.
    """
    said, models, trained_says = {}, [], hf_check._trained

    def training(opened, rows, vocabulary):
        models.append(weakref.ref(opened.model))
        said.update(trained_says(opened, rows, vocabulary))
        return dict(said)

    def stand_in(*args):
        assert models and all(model() is None for model in models), "two models at once"
        return dict(said)

    monkeypatch.setattr(hf_check, "_trained", training)
    monkeypatch.setattr(hf_check, "_in_fresh_process", stand_in)
    monkeypatch.setattr(to_hf, "refuse_no_transformers", lambda python: None)
    return models


def test_one_model_at_a_time(trained, tmp_path, other_process):
    """The training model is gone before the other process loads its own, or a large one is checked on no machine."""
    assert to_hf.main([str(trained), str(tmp_path / "target")]) == 0
    assert len(other_process) == 1


def test_a_tokenizer_that_lies_elsewhere_now(exported, tmp_path, other_process, capsys):
    """Folders are moved, on clusters and to other machines: their own tokenizer is found, and one that is named is
    enough for the check too, or every weight is written before it fails."""
    file = tmp_path / "tokenizer.json"
    shutil.copyfile(exported / "tokenizer.json", file)
    assert from_hf.main([str(exported), str(tmp_path / "was"), "--tokenizer", str(file)]) == 0
    (tmp_path / "was").rename(tmp_path / "is")
    assert to_hf.main([str(tmp_path / "is"), str(tmp_path / "found")]) == 0
    (tmp_path / "is" / "tokenizer.json").unlink()
    assert to_hf.main([str(tmp_path / "is"), str(tmp_path / "lost")]) == 2
    assert "data.tokenizer" in capsys.readouterr().err and not (tmp_path / "lost").exists()
    assert to_hf.main([str(tmp_path / "is"), str(tmp_path / "named"), "--tokenizer", str(file)]) == 0
    assert len(other_process) == 2


@pytest.mark.slow
@pytest.mark.parametrize("split", ["tensor", "pipeline", "context"])
def test_checkpoints_of_two_ranks_are_exported_whole(split, tmp_path):
    """A matrix put together in another order than ranks took it apart is a model that babbles."""
    changes = {f"parallel__{split}": 2, "training__steps": 1, "model__block": "null", "model__pattern": "mg"}
    assert run_world(2, train_here, tiny_config(tmp_path, **changes)) == [0, 0]
    assert to_hf.main([str(tmp_path / "run"), str(tmp_path / "model"), "--no-check"]) == 0
    found = read_all(tmp_path / "model")
    with open_model(tmp_path / "run") as opened:
        want = {name: x for name, x in opened.model.state_dict().items() if isinstance(x, torch.Tensor) and x.numel()}
    assert {to_ours(name) for name in found} == set(want)
    for name, tensor in found.items():
        assert torch.equal(tensor, want[to_ours(name)][: len(tensor)]), name


@pytest.mark.slow
def test_transformers_has_the_trained_model(capsys, trained, tmp_path):
    """Everything above is for this: logits and text as trained, with nothing of ours installed."""
    pytest.importorskip("transformers")
    assert to_hf.main([str(trained), str(tmp_path / "target"), "--python", sys.executable]) == 0
    out = capsys.readouterr().out
    assert out.count("  ok ") == 4


# -- the hub -----------------------------------------------------------------------------------------------


class Hub:
    """Stands in for huggingface_hub.HfApi."""

    def __init__(self, error=None):
        self.error, self.calls = error, []

    def create_repo(self, **options):
        self.calls.append(("create_repo", options))
        return f"hub/{options['repo_id']}"

    def upload_folder(self, **options):
        if self.error:
            raise self.error
        self.calls.append(("upload_folder", options))


def test_a_folder_is_pushed(tmp_path):
    """One repository, made if need be, private where asked for, and the whole folder."""
    hub = Hub()
    assert push(tmp_path, "me/model", True, hub) == "hub/me/model"
    (made, options), (sent, what) = hub.calls
    assert made == "create_repo" and options["private"] and options["exist_ok"]
    assert sent == "upload_folder" and what["folder_path"] == str(tmp_path) and what["repo_id"] == "me/model"


def test_what_an_earlier_export_left_on_the_hub_goes(tmp_path):
    """A model.safetensors beside new shards is what transformers loads: the old weights, under the new card."""
    hub = Hub()
    push(tmp_path, "me/model", True, hub)
    patterns = hub.calls[-1][1]["delete_patterns"]
    gone = [
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "padding.safetensors",
        "rules.py",
    ]
    assert all(any(fnmatch(name, pattern) for pattern in patterns) for name in gone)
    assert not any(
        fnmatch(name, pattern) for pattern in patterns for name in (".gitattributes", "LICENSE", "README.md")
    )


def test_a_push_that_fails_says_why(tmp_path):
    """And that the folder is there, so that nothing has to be exported again."""
    with pytest.raises(ValueError, match="--push me/model: not allowed; .* is complete"):
        push(tmp_path, "me/model", False, Hub(RuntimeError("not allowed\nlong story")))
