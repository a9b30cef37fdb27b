"""If these fail, a user's word is not obeyed, or a typing error trains the wrong model for a week."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from miras_megatron.config.errors import ConfigError
from miras_megatron.config.load import Command, dump_run, load_file, load_run, parse_command_line
from miras_megatron.config.schema import Data, Memory, Model, Needles, Run


def write(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def parse(*argv: str) -> Command:
    return parse_command_line(argv, prog="miras-train", description="Trains.", switches={"dry-run": "sizes only"})


def problems(*argv: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse(*argv)
    return caught.value.problems


@pytest.mark.parametrize("before", [True, False])
def test_an_override_wins_wherever_it_stands(tmp_path: Path, before: bool) -> None:
    """People put overrides before and after the file; the file must never undo one."""
    path = write(tmp_path, "model: {block: mac, layers: 4}\noptimizer: {lr: 1e-3}\ndata: {needles: {rows: 0.3}}")
    words = ["--model.layers=6", "--optimizer.lr", "5e-4", "--data.needles.per_row=2", "--memory.options.p=4"]
    command = parse(*words, path) if before else parse(path, *words, "--dry-run")
    run = command.run
    assert (run.model.block, run.model.layers, run.optimizer.lr) == ("mac", 6, 5e-4)
    assert run.data.needles == Needles(rows=0.3, per_row=2)
    assert run.memory.options == {"p": 4}
    assert command.switches == {"dry-run": not before}
    assert command.source == path


def test_what_is_not_said_is_the_default(tmp_path: Path) -> None:
    """An empty file is a run, but for the block that nobody can guess."""
    assert load_run([write(tmp_path, "")]) == Run()
    assert load_run([write(tmp_path, "optimizer:\n")]) == Run()


def test_a_file_is_read_whatever_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`./-lr3e-4/config.yaml` is `-lr3e-4/config.yaml` to pathlib: as an override, a run of that name can't be read."""
    monkeypatch.chdir(tmp_path)
    Path("-a=b").mkdir()
    Path("-a=b/config.yaml").write_text("optimizer: {lr: 3.0e-4}\n", encoding="utf-8")
    assert load_file(Path("./-a=b/config.yaml")).optimizer.lr == 3e-4


def test_a_dumped_run_reads_back_equal(tmp_path: Path) -> None:
    """The file saved with a run is what resume, generation and people go by."""
    run = Run(
        model=Model(pattern="cm", layers=4),
        memory=Memory(options={"objective": "lp", "p": 3.5, "max_gradient_norm": None}, lr_max=5.4e-5),
        data=Data(train=["0.3 a b", "c"], needles=Needles(marker="§", alphabet="01")),
    )
    assert load_run([write(tmp_path, dump_run(run))]) == run
    assert load_run([write(tmp_path, dump_run(run, comments=False))]) == run


def test_a_dumped_value_is_its_own_not_that_of_another_run() -> None:
    """Lines are kept between dumps: 1, 1.0 and true are equal to Python, and 0.0 and -0.0."""
    values: list[Any] = [1, 1.0, True, "1", [1], [1.0], 0.0, -0.0]
    dumped = [
        yaml.safe_load(dump_run(Run(memory=Memory(options={"p": value}))))["memory"]["options"] for value in values
    ]
    assert [repr(options["p"]) for options in dumped] == [repr(value) for value in values]


def test_lists_and_nulls_can_be_overridden(tmp_path: Path) -> None:
    """Blends and switches-off come from the command line too."""
    path = write(tmp_path, "data: {needles: {rows: 0.3}, train: x}\nmemory: {depth: 3}")
    run = load_run(["--data.needles=null", path, '--data.train=["0.5 a", "b"]', "--memory.depth=null"])
    assert run.data == Data(train=["0.5 a", "b"])
    assert run.memory == Memory()


def test_every_mistake_is_told_at_once(tmp_path: Path) -> None:
    """A user who mends one error per start gives up."""
    path = write(
        tmp_path,
        "modl: {block: mac}\nmodel: {block: mca, hiden: 3, layers: 2.5, hidden: abc}\ntraining: 3\ndata: {train: 3}",
    )
    found = problems(path, "--optimizer.lr=nan", "--data.needles.row=3", "--foo", "--memory.lr=3", "--training.steps")
    assert found == (
        "--foo: unknown",
        "training.steps: no value given; say --training.steps=VALUE",
        "modl.block: unknown field; did you mean model.block?; --help lists all",
        "model.hiden: unknown field; did you mean model.hidden?; --help lists all",
        "training = 3: is a section; set its fields, training.FIELD",
        "data.needles.row: unknown field; did you mean data.needles.rows?; --help lists all",
        "memory.lr: unknown field; did you mean memory.lr_max?; --help lists all",
        "model.block = 'mca': must be one of lmm, mac, mag, mal, attention or null",
        "model.layers = 2.5: must be a whole number",
        "model.hidden = 'abc': must be a whole number",
        "data.train = 3: must be text or a list, each text",
        "optimizer.lr = 'nan': must be a number",
    )


def test_a_misspelt_switch_is_refused(tmp_path: Path) -> None:
    """`--dryrun` must not start a training run."""
    assert problems(write(tmp_path, ""), "--dryrun") == ("--dryrun: unknown; did you mean --dry-run?",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {block: mac", "not YAML"),
        ("[1, 2]", "must hold sections"),
        ("model: {hidden: null}", "= null: must be"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    """The message says which file and what is wrong in it."""
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=f"1 problem in {path}") as caught:
        parse(path)
    assert words in str(caught.value)


def test_a_key_given_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    """YAML takes the last of them: a run would have another learning rate than the line its author looks at."""
    text = """\
model: {hidden: 64, hidden: 32}
memory:
  chunk_size: 8
  options: {window: 2, window: 3}
  chunk_size: 16
optimizer: {lr: 1.0e-3}
optimizer:
  lr: 1.0e-4
"""
    assert problems(write(tmp_path, text)) == (
        "model.hidden: given twice, in line 1 and line 1; keep one",
        "memory.options.window: given twice, in line 4 and line 4; keep one",
        "memory.chunk_size: given twice, in line 3 and line 5; keep one",
        "optimizer: given twice, in line 6 and line 7; keep one",
    )


def test_missing_and_surplus_files() -> None:
    """One run is one file."""
    assert problems("nowhere.yaml") == ("no such file",)
    assert "no configuration given" in problems()[0]


def test_a_second_file_is_refused(tmp_path: Path) -> None:
    """Two files would need a rule for who wins."""
    path = write(tmp_path, "")
    assert problems(path, "other.yaml") == ("other.yaml: a second configuration; one run is one file",)


def test_print_config_and_help(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both list every field; what is printed can be run."""
    path = write(tmp_path, "model: {block: mal, layers: 4}")
    for word, listed in (("--print_config", "  segment:"), ("--help", "--model.segment=VALUE")):
        with pytest.raises(SystemExit) as end:
            parse(path, word)
        printed = capsys.readouterr().out
        assert end.value.code == 0 and listed in printed
        if word == "--print_config":
            assert load_run([write(tmp_path, printed)]) == replace(Run(), model=Model(block="mal", layers=4))


def test_a_wrong_configuration_ends_with_two_and_no_traceback(tmp_path: Path) -> None:
    """Scripts look at the exit code, people at the message."""
    path = write(tmp_path, "model: {block: mac, hiden: 3}")
    script = "import sys; from miras_megatron.training.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "did you mean model.hidden?" in done.stderr and "Traceback" not in done.stderr


def test_help_may_be_read_by_a_program_that_leaves_early():
    """`miras-train --help | head` must not end in a traceback."""
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-c", "from miras_megatron.config.load import load_run; load_run(['--help'])"]
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
