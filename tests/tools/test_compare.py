"""If these failed, a wrong layout would pass for rounding, or rounding would send people looking for a bug."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_run import tiny_config, train_here
from helpers.worlds import run_world
from miras_tools import compare
from miras_tools.compare_runs import read_run
from miras_tools.compare_verdict import LOSS, NORM, PARAMETER, TOLERANCES, Bound, judge

from miras_megatron.training.main import main as train

ROOT = Path(__file__).resolve().parents[2]
TINY: dict[str, Any] = {"training__steps": 3, "data__split": "100,0,0", "logging__gradients_every": 1}
TINY |= {"checkpoint__every": 0, "optimizer__decay_steps": 3}


def write(folder: Path, steps: list[dict[str, Any]], gradients: dict[int, dict[str, float]] | None = None) -> str:
    """A run folder without a configuration."""
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in steps))
    lines = [{"step": step, "gradients": norms} for step, norms in (gradients or {}).items()]
    if lines:
        (folder / "gradients.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


def curve(*losses: float | str, first: int = 1, norm: float = 1.0) -> list[dict[str, Any]]:
    return [{"step": first + n, "loss": loss, "grad_norm": norm} for n, loss in enumerate(losses)]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny run `one`, beside which others are made."""
    folder = tmp_path_factory.mktemp("runs")
    assert train(tiny_config(folder, "one", **TINY)) == 0
    return folder


def test_the_same_run_twice_is_equal(one: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Anything else is nondeterminism, which hides every other difference."""
    assert train(tiny_config(one, "again", **TINY)) == 0
    capsys.readouterr()
    assert compare.main([str(one / "one"), str(one / "again")]) == 0
    printed = capsys.readouterr().out
    assert "same-layout: inferred, since" in printed
    assert "steps 1 to 3: equal" in printed and "verdict: equal" in printed


def test_another_seed_fails_at_the_first_step_and_a_parameter_is_named(
    one: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first question about two runs that part is where."""
    assert train(tiny_config(one, "seed", **TINY, training__seed=6)) == 0
    capsys.readouterr()
    out = one / "report.json"
    for kind in ([], ["--kind", "other-layout"], ["--kind", "bf16"]):
        assert compare.main([str(one / "one"), str(one / "seed"), "--json", str(out), *kind]) == 1
        printed = capsys.readouterr().out
        assert "first failing step: 1;" in printed
        assert "not the same training, so a failure is no surprise: training.seed is 5 and 6" in printed
        assert "data-parallel" not in printed
        report = json.loads(out.read_text())
        assert (report["verdict"], report["first_failing_step"]) == ("failure", 1)
        assert (
            report["first_failing"].startswith(("decoder.layers.", "embedding.")) and report["first_failing"] in printed
        )
        assert [step["step"] for step in report["steps"]] == [1, 2, 3]
        assert report["steps"][0]["differences"][0]["quantity"] == LOSS


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_another_layout_drifts_within_its_tolerance(one: Path, axis: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Sums in another order are no failure; the kind of comparison is read from the two configurations."""
    argv = tiny_config(one, axis, **TINY, **{f"parallel__{axis}": 2})
    assert run_world(2, train_here, argv) == [0, 0]
    capsys.readouterr()
    assert compare.main([str(one / "one"), str(one / axis), "--json", str(one / "report.json")]) == 0
    printed = capsys.readouterr().out
    assert f"other-layout: inferred, since parallel.{axis} is 1 and 2" in printed
    worst = max(
        d["relative"] / d["allowed"]
        for step in json.loads((one / "report.json").read_text())["steps"]
        for d in step["differences"]
    )
    assert worst < 0.5


def test_precision_is_inferred(one: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A user who compares bf16 with fp32 must not be told that bf16 is broken."""
    assert train(tiny_config(one, "bf16", **TINY, training__precision="bf16")) == 0
    capsys.readouterr()
    assert compare.main([str(one / "one"), str(one / "bf16")]) == 0
    assert "bf16: inferred, since training.precision is 'fp32' and 'bf16'" in capsys.readouterr().out


def test_a_bound_grows_to_its_ceiling() -> None:
    """Training is chaotic: what is a failure at the first step is rounding later, but never anything at all."""
    bound = Bound(1e-6, 1.25, 0.05)
    assert bound.at(0) == pytest.approx(1e-6)
    assert bound.at(10) == pytest.approx(1e-6 * 1.25**10)
    assert bound.at(10**9) == 0.05
    assert Bound(0.0).at(10**9) == 0.0


def test_the_page_has_the_bounds_and_their_reasons() -> None:
    """The tolerances are published: the page says what the program does."""
    page = (ROOT / "docs/testing.md").read_text()
    for kind, tolerance in TOLERANCES.items():
        cells = [kind]
        for quantity in (LOSS, NORM, PARAMETER):
            bound = tolerance.bounds[quantity]
            ceiling = bound.at(10**9)
            cells += [f"{bound.first:g}", "-" if ceiling == 1.0 else f"{ceiling:g}"]
            assert bound.growth == (1.0 if kind == "same-layout" else 1.25)
        assert f"| {' | '.join([*cells, tolerance.reason])} |" in page


def test_verdicts_of_steps_are_equal_drift_or_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A user reads where the runs begin to part, and where that stops being rounding."""
    a = write(tmp_path / "a", curve(5.0, 4.0, 3.0, 2.0, norm=0.5))
    b = write(tmp_path / "b", curve(5.0, 4.000001, 3.000001, 2.1, norm=0.5))
    assert compare.main([a, b, "--kind", "other-layout"]) == 1
    printed = capsys.readouterr().out
    assert "step 1: equal" in printed and "steps 2 to 3: drift; loss up to 3.3e-07" in printed
    assert "step 4: failure" in printed and "loss: 2 and 2.1, apart by 4.8e-02" in printed
    assert "logging.gradients_every=1" in printed
    assert compare.main([a, b, "--kind", "other-layout", "--steps", "3"]) == 0
    assert compare.main([a, b, "--kind", "same-layout", "--steps", "3"]) == 1
    assert "first failing step: 2" in capsys.readouterr().out


def test_bounds_grow_from_the_first_step_in_both(tmp_path: Path) -> None:
    """Two runs that go on from one checkpoint at step 500 part from there."""
    a = write(tmp_path / "a", curve(2.0, 2.0, first=501))
    b = write(tmp_path / "b", curve(2.001, 2.0, first=501))
    assert compare.main([a, b, "--kind", "other-layout"]) == 1


def test_the_parameter_farthest_outside_is_named_first() -> None:
    """One wrong matrix moves the loss and every norm after it; the farthest is where to look."""
    norms = {"first": 1.0, "second": 0.5, "tiny": 1e-9}
    a, b = {"loss": 2.0, "grad_norm": 1.2}, {"loss": 2.1, "grad_norm": 1.2}
    step = judge(
        1, 1, a | {"gradients": norms}, b | {"gradients": norms | {"second": 0.7, "tiny": 2e-9}}, "other-layout"
    )
    assert [d.quantity for d in step.failures] == ["second", "loss"]
    equal = judge(1, 1, a | {"gradients": norms}, a | {"gradients": norms | {"tiny": 2e-9}}, "same-layout")
    assert [d.quantity for d in equal.failures] == ["tiny"]
    other = judge(1, 1, a | {"gradients": norms}, a | {"gradients": {"first": 1.0, "third": 0.1}}, "bf16")
    assert {d.quantity for d in other.failures} == {"second", "tiny", "third"}


@pytest.mark.parametrize(
    ("a", "b", "code"),
    [("nan", 2.0, 1), (2.0, "inf", 1), ("nan", "nan", 0), ("inf", "-inf", 1), (0.0, 0.0, 0), (0.0, 1e-30, 1)],
)
def test_a_number_that_is_none_is_equal_only_to_its_like(tmp_path: Path, a: Any, b: Any, code: int) -> None:
    """A run that has gone wrong must not count as near to one that hasn't."""
    names = write(tmp_path / "a", curve(a)), write(tmp_path / "b", curve(b))
    assert compare.main([*names, "--kind", "bf16", "--json", str(tmp_path / "r.json")]) == code
    json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)


def test_a_last_line_cut_by_a_kill_is_left_out(tmp_path: Path) -> None:
    """Runs are compared while they go."""
    a, b = write(tmp_path / "a", curve(2.0, 1.0)), write(tmp_path / "b", curve(2.0))
    with (tmp_path / "b" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "loss": 7')
    assert compare.main([a, f"{b}/metrics.jsonl", "--kind", "same-layout"]) == 0


def test_bad_input_is_one_message_with_the_file_and_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 is neither of the two answers."""
    good = write(tmp_path / "good", curve(2.0, 1.0))
    late = write(tmp_path / "late", curve(2.0, first=9))
    wrong = write(tmp_path / "wrong", curve(2.0))
    Path(wrong, "config.yaml").write_text("model: {hiden: 3}\n")
    (tmp_path / "empty").mkdir()
    empty_file, text, other = tmp_path / "none.jsonl", tmp_path / "text.jsonl", tmp_path / "other.jsonl"
    empty_file.write_text("")
    text.write_text("hello\n")
    other.write_text('{"step": 1}\n')
    cases = [
        ([str(tmp_path / "nowhere"), good], "nowhere: no such file or folder; name a run folder"),
        ([good, str(tmp_path / "empty")], "empty: holds no metrics.jsonl; name a run folder"),
        ([good, str(empty_file)], "none.jsonl: holds no complete step"),
        ([good, str(text)], "text.jsonl: line 1 isn't JSON"),
        ([good, str(other)], "other.jsonl: line 1 has no loss"),
        ([good, good], "good: no config.yaml beside it to tell the layout from; say --kind"),
        ([good, wrong], "config.yaml: can't be read by this version (model.hiden: unknown field"),
        ([good, late, "--kind", "bf16"], "no step in both (1 to 2 and 9 to 9); name runs that overlap"),
        ([good, good, "--kind", "bf16", "--steps", "3"], "good: --steps 3, but it ends at step 2; ask for fewer"),
        ([good, good, "--kind", "bf16", "--json", str(tmp_path / "no/x")], "no such folder; make it first"),
    ]
    for argv, message in cases:
        assert compare.main(argv) == 2, argv
        captured = capsys.readouterr()
        assert message in captured.err and captured.err.count("\n") == 1 and not captured.out


@pytest.mark.parametrize(
    ("changed", "name"),
    [({"loss": "a"}, "loss"), ({"loss": None}, "loss"), ({"step": "1"}, "step"), ({"grad_norm": {}}, "grad_norm")],
)
def test_what_is_no_number_is_named_with_file_and_line(
    tmp_path: Path, changed: dict[str, Any], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """ "could not convert string to float: 'a'" sends nobody to line 2."""
    first, second = curve(2.0, 1.0)
    a, b = write(tmp_path / "a", [first, second]), write(tmp_path / "b", [first, second | changed])
    assert compare.main([a, b, "--kind", "bf16"]) == 2
    assert f"{b}/metrics.jsonl: line 2: {name} is no number" in capsys.readouterr().err


def test_a_gradient_that_is_no_number_is_named_with_file_and_line(tmp_path: Path) -> None:
    """The other file of a run."""
    a = write(tmp_path / "a", curve(2.0), {1: {"w": "x"}})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"gradients.jsonl: line 1: gradients is no number"):
        read_run(a)


@pytest.mark.parametrize("argv", [[], ["a"], ["a", "b", "--steps", "0"], ["a", "b", "--kind", "fp8"]])
def test_wrong_arguments_end_with_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """As every command of ours does."""
    with pytest.raises(SystemExit) as stop:
        compare.main(argv)
    assert stop.value.code == 2


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    """Somebody who doubts a layout should have to copy four lines."""
    with pytest.raises(SystemExit) as stop:
        compare.main(["--help"])
    assert stop.value.code == 0
    assert "miras-compare runs/one runs/two" in capsys.readouterr().out
