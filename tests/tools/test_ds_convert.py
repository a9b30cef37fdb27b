"""Checkpoints go to DeepSpeed and come back bit for bit, and nothing is unpickled that wasn't asked for."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_run import learned, tiny_config, train_here
from helpers.worlds import run_world
from miras_tools.ds_common import read_common
from miras_tools.ds_convert import _latest, main
from miras_tools.hf_shapes import weight_shapes

from miras_megatron.compat.cpu import core_without_cuda
from miras_megatron.config.load import load_run
from miras_megatron.parallel.mesh import ParallelMesh
from miras_megatron.training.build_job import build_job
from miras_megatron.training.checkpoint import saved_run
from miras_megatron.training.checkpoint_folder import find_checkpoint
from miras_megatron.training.main import main as train
from miras_megatron.training.stored_tensors import StoredTensors
from miras_megatron.training.tokenizer import with_vocabulary

HALF = {"training__steps": 2, "optimizer__decay_steps": 4, "training__micro_batch": 1, "checkpoint__every": 0}
needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed isn't installed: pip install deepspeed==0.19.8"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run in bf16, of two steps."""
    folder = tmp_path_factory.mktemp("convert")
    assert train(tiny_config(folder, "run", **HALF, training__precision="bf16")) == 0
    return folder


def tensors(run: Path) -> dict[str, Any]:
    """Every tensor but random states, by name."""
    stored = StoredTensors(find_checkpoint(run, "RUN"))
    return {name: stored.read(name) for name in stored.names if not name.startswith("random.")}


def check_same(run: Path, other: Path, masters: bool = True) -> None:
    one, two = tensors(run), tensors(other)
    assert one.keys() == two.keys() and any(name.startswith("optimizer.master.") for name in one) == masters
    for name, tensor in one.items():
        assert tensor.dtype == two[name].dtype and torch.equal(tensor, two[name]), name


@pytest.mark.parametrize(("precision", "close"), [("fp32", 1e-6), ("bf16", 2e-2)])
def test_a_universal_checkpoint_goes_on_in_another_layout(tmp_path: Path, precision: str, close: float) -> None:
    """Weights, masters and moments are those of the run; two ranks that share heads go on from it as it would itself.

    bf16 in another layout: products are rounded in other places.
    """
    changes = HALF | {"training__precision": precision}
    run, universal, again = tmp_path / "run", tmp_path / "universal", tmp_path / "again"
    assert train(tiny_config(tmp_path, "run", **changes)) == 0
    assert main(["to-universal", str(run), str(universal)]) == 0
    assert main(["from-deepspeed", str(universal), str(again)]) == 0
    check_same(again, run, masters=precision == "bf16")
    argv = tiny_config(tmp_path, "run", **changes | {"training__steps": 3})
    assert train(argv) == 0
    assert run_world(2, train_here, [*argv, f"--run.dir={again}", "--parallel.tensor=2"]) == [0, 0]
    assert learned(again)[-1] == pytest.approx(learned(run)[-1], rel=close)


def test_pickled_objects_are_read_only_on_demand(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint from a stranger must not run code because somebody converted it."""
    universal = tmp_path / "universal"
    assert main(["to-universal", str(folder / "run"), str(universal)]) == 0
    victim = universal / "zero" / "decoder.final_layernorm.weight" / "fp32.pt"
    shape = torch.load(victim)["param"].shape
    torch.save({"param": torch.ones(shape), "cat_dim": Path("anything")}, victim, pickle_module=pickle)
    capsys.readouterr()
    assert main(["from-deepspeed", str(universal), str(tmp_path / "again")]) == 2
    said = capsys.readouterr().err
    assert str(victim) in said and "only with --trust-pickle" in said and not (tmp_path / "again").exists()
    assert main(["from-deepspeed", str(universal), str(tmp_path / "again"), "--trust-pickle"]) == 0
    assert torch.equal(tensors(tmp_path / "again")["decoder.final_layernorm.weight"], torch.ones(shape))


def test_what_is_no_checkpoint_of_this_model_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise a run starts from weights that are missing, or of another shape."""
    universal = tmp_path / "universal"
    assert main(["from-deepspeed", str(tmp_path), str(tmp_path / "again")]) == 2
    assert "has no miras/config.yaml; name a run of the same model with --like" in capsys.readouterr().err
    assert main(["from-deepspeed", str(tmp_path), str(tmp_path / "again"), "--like", str(folder / "run")]) == 2
    assert "neither a universal checkpoint (zero/) nor DeepSpeed's own" in capsys.readouterr().err
    assert main(["to-universal", str(folder / "run"), str(universal)]) == 0
    moment = universal / "zero" / "decoder.final_layernorm.weight" / "exp_avg.pt"
    torch.save({"param": torch.zeros(3)}, moment)
    assert main(["from-deepspeed", str(universal), str(tmp_path / "again")]) == 2
    said = capsys.readouterr().err
    assert f"{moment}: holds a strided tensor of float32 on cpu, shape [3], must hold" in said and "[16]" in said
    moment.unlink()
    assert main(["from-deepspeed", str(universal), str(tmp_path / "again")]) == 2
    assert f"{moment} is missing" in capsys.readouterr().err


@pytest.fixture(scope="module")
def universal(folder: Path) -> Path:
    """The run of `folder` as a universal checkpoint."""
    assert main(["to-universal", str(folder / "run"), str(folder / "shared")]) == 0
    return folder / "shared"


@pytest.mark.parametrize("name", ["__0_0.distcp", "common.pt"])
def test_a_flipped_bit_goes_into_no_other_checkpoint(
    folder: Path, universal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """The universal folder has no manifest: a weight that a disk has changed would be taken for what was learned."""
    hurt = tmp_path / "hurt"
    shutil.copytree(find_checkpoint(folder / "run", "RUN"), hurt)
    content = bytearray((hurt / name).read_bytes())
    content[len(content) // 2] ^= 4
    (hurt / name).write_bytes(content)
    for argv in (["to-universal", str(hurt)], ["from-deepspeed", str(universal), "--like", str(hurt)]):
        assert main([*argv, str(tmp_path / "made")]) == 2
        said = capsys.readouterr().err
        assert "damaged checkpoint" in said and f"{hurt / name} has changed since it was written" in said
    assert not (tmp_path / "made").exists()


def refused(universal: Path, tmp_path: Path, file: str, content: Any, *options: str) -> int:
    """Exit code of from-deepspeed where `content` stands in `file` instead; nothing may be made then."""
    foreign, made = tmp_path / "foreign", tmp_path / "made"
    shutil.copytree(universal, foreign)
    torch.save(content, foreign / file)
    code = main(["from-deepspeed", str(foreign), str(made), *options])
    assert not made.exists() or code == 0
    return code


@pytest.mark.parametrize(
    "step",
    [
        {"a": 1},
        None,
        float("inf"),
        float("nan"),
        "abc",
        -5,
        1e30,
        1.5,
        True,
        torch.ones(3),
        torch.ones((), device="meta"),
    ],
    ids=str,
)
def test_updates_that_are_no_whole_number_are_refused(
    universal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], step: Any
) -> None:
    """AdamW corrects its moments by this number: a wrong one trains another run, a strange one ends in a traceback."""
    first = next(iter(weight_shapes(saved_run(universal / "miras"))))
    file = f"zero/{first}/step.pt"
    assert refused(universal, tmp_path, file, step) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path / 'foreign' / file}: holds " in said and "must hold a whole number of updates from 0" in said


def test_updates_may_be_a_tensor_of_one_or_not_there_but_no_folder(
    universal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSpeed writes a tensor, older folders nothing, and a folder there is a broken copy."""
    first = next(iter(weight_shapes(saved_run(universal / "miras"))))
    foreign = tmp_path / "foreign"
    path = foreign / "zero" / first / "step.pt"
    assert refused(universal, tmp_path, f"zero/{first}/step.pt", torch.tensor(7.0)) == 0
    assert read_common(find_checkpoint(tmp_path / "made", "RUN"))["updates"] == 7
    path.unlink()
    assert main(["from-deepspeed", str(foreign), str(tmp_path / "without")]) == 0
    assert read_common(find_checkpoint(tmp_path / "without", "RUN"))["updates"] == 2
    path.mkdir()
    capsys.readouterr()
    assert main(["from-deepspeed", str(foreign), str(tmp_path / "again")]) == 2
    assert f"{path}: is no file" in capsys.readouterr().err


STRANGE: dict[str, Callable[[torch.Size], Any]] = {
    "sparse": lambda shape: torch.zeros(shape).to_sparse(),
    "quantized": lambda shape: torch.quantize_per_tensor(torch.zeros(shape), 0.1, 0, torch.qint8),
    "meta": lambda shape: torch.zeros(shape, device="meta"),
    "complex": lambda shape: torch.zeros(shape, dtype=torch.complex64),
    "integer": lambda shape: torch.zeros(shape, dtype=torch.int64),
    "transposed": lambda shape: torch.zeros(shape[::-1]),
    "no tensor": lambda shape: "abc",
}


@pytest.mark.parametrize("kind", ["fp32", "exp_avg_sq"])
@pytest.mark.parametrize("strange", STRANGE)
def test_a_tensor_of_another_kind_is_refused(
    universal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], strange: str, kind: str
) -> None:
    """A transposed matrix has as many numbers: it would be taken for weights, and the model would babble."""
    shapes = weight_shapes(saved_run(universal / "miras"))
    name, shape = next((name, shape) for name, shape in shapes.items() if len(set(shape)) == 2)
    file = f"zero/{name}/{kind}.pt"
    assert refused(universal, tmp_path, file, {"param": STRANGE[strange](torch.Size(shape))}) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path / 'foreign' / file}: holds " in said
    assert f"must hold a dense floating point tensor of shape {list(shape)}" in said


@pytest.mark.parametrize(
    ("kind", "number", "said"),
    [
        ("fp32", float("nan"), "nan, no finite number"),
        ("exp_avg", float("nan"), "nan, no finite number"),
        ("exp_avg_sq", float("nan"), "nan, no finite number"),
        ("fp32", float("-inf"), "-inf, no finite number"),
        ("exp_avg_sq", 1e300, "inf, no finite number"),
        ("exp_avg_sq", -1e-30, "-1e-30, below 0, where means of squares lie"),
    ],
)
def test_numbers_with_which_no_run_goes_on_are_refused(
    universal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, number: float, said: str
) -> None:
    """The first step makes NaN of a root of less than 0 in every weight, hours after the folder was converted."""
    name, shape = list(weight_shapes(saved_run(universal / "miras")).items())[-1]
    wrong = torch.zeros(shape, dtype=torch.float64)
    wrong.view(-1)[-1] = number
    file = f"zero/{name}/{kind}.pt"
    assert refused(universal, tmp_path, file, {"param": wrong}) == 2
    assert f"{tmp_path / 'foreign' / file}: {kind} of {name} holds {said}; " in capsys.readouterr().err


def test_moments_may_be_below_zero_where_they_are_means(universal: Path, tmp_path: Path) -> None:
    """The mean of gradients has either sign, and so has a weight."""
    name, shape = next(iter(weight_shapes(saved_run(universal / "miras")).items()))
    assert refused(universal, tmp_path, f"zero/{name}/exp_avg.pt", {"param": torch.full(tuple(shape), -1.0)}) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, None) for name in ("step", "tokens", "updates", "tokenizer", "data")),
        *(("step", "x"), ("step", -1), ("step", 1.5), ("tokens", "many"), ("updates", True), ("tokenizer", 3)),
        *(("data", 7), ("data", {"usual": {"samples": -1, "fingerprint": "a"}}), ("data", {"long": {}})),
        *(("recent", "q"), ("recent", {"losses": ["x"]})),
    ],
)
def test_common_values_with_which_no_run_goes_on_are_refused(
    universal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: Any
) -> None:
    """Else the folder is made, and the run that starts from it hours later ends in a traceback."""
    common = read_common(universal / "miras")
    changed = {key: kept for key, kept in common.items() if key != name} | ({} if value is None else {name: value})
    assert refused(universal, tmp_path, "miras/common.pt", changed) == 2
    said = capsys.readouterr().err
    told = f"{name} is missing" if value is None else f"{name} = "
    assert value is None or ": must be " in said
    assert f"{tmp_path / 'foreign/miras/common.pt'}: {told}" in said and "with --like" in said


def test_a_target_with_a_nul_byte_is_one_message(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No file may be called so, and Python says it in a traceback."""
    assert main(["to-universal", str(folder / "run"), "a\0b"]) == 2
    assert "FOLDER = 'a\\x00b': holds a NUL byte" in capsys.readouterr().err


def read_by_deepspeed(argv: list[str], universal: Path, run: Path) -> bool:
    """Whether DeepSpeed's own reader puts into a new job's masters on this rank what the run has."""
    job_run, stored = with_vocabulary(load_run(argv)), StoredTensors(find_checkpoint(run, "RUN"))
    with core_without_cuda(), ParallelMesh(job_run.parallel) as mesh:
        job = build_job(job_run, mesh)
        zero = job.engine.zero  # type: ignore[union-attr]
        zero.optimizer.load_hp_checkpoint_state_from_checkpoint_dir("bit16_groups", str(universal))
        names, same = {id(weight): name for name, weight in job.model.named_parameters()}, []
        for part in zero.parts:
            name, (start, end) = names[id(part.weight)], part.spans[zero.rank]
            master = f"optimizer.master.{name}"
            whole = stored.read(master if master in stored.names else name).view(-1)
            here = part.of(zero.masters, zero.rank)
            same.append(here is None or torch.equal(here, whole[start:end]))
    return all(same)


def test_of_several_checkpoints_the_latest_is_meant(tmp_path: Path) -> None:
    """By name step 900 comes after step 1000."""
    folders = [tmp_path / name for name in ("global_step1000", "global_step900")]
    with pytest.raises(ValueError, match=r"holds global_step1000, global_step900, and no `latest`"):
        _latest(tmp_path, folders)
    (tmp_path / "latest").write_text("global_step1000")
    assert _latest(tmp_path, folders) == folders[0]
    assert _latest(tmp_path, folders[1:]) == folders[1]


@needs_deepspeed
def test_deepspeed_reads_our_universal_checkpoint(folder: Path, tmp_path: Path) -> None:
    """It is for others: each of two ranks finds its parts of the masters in it."""
    universal = tmp_path / "universal"
    assert main(["to-universal", str(folder / "run"), str(universal)]) == 0
    other = {"training__precision": "bf16", "training__seed": 6, "optimizer__engine": "deepspeed"}
    argv = tiny_config(folder, "read", **HALF, **other)
    assert run_world(2, read_by_deepspeed, argv, universal, folder / "run") == [True, True]


@needs_deepspeed
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(3, marks=pytest.mark.full)])
def test_deepspeeds_own_checkpoint_comes_back_bit_for_bit(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], stage: int
) -> None:
    """It is all pickles: without the flag it is named and left alone."""
    own, again = tmp_path / "own", tmp_path / "again"
    assert main(["to-deepspeed", str(folder / "run"), str(own), "--zero", str(stage)]) == 0
    assert list(own.glob("step_2/*_optim_states.pt"))
    capsys.readouterr()
    assert main(["from-deepspeed", str(own), str(again)]) == 2
    assert "only with --trust-pickle" in capsys.readouterr().err
    assert main(["from-deepspeed", str(own), str(again), "--trust-pickle"]) == 0
    check_same(again, folder / "run")
