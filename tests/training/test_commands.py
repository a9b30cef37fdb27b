"""What users meet: the commands' output, and one clear message with exit code 2 for everything they can get wrong."""

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys

import pytest
from helpers.tiny_run import learned, records, tiny_config
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from miras_megatron.parallel.exit_code import VARIABLE, told_exit_code
from miras_megatron.parallel.lost import RankLost
from miras_megatron.parallel.mesh import ParallelMesh
from miras_megatron.training import generate, loop, run_folder
from miras_megatron.training.guard import NotANumber
from miras_megatron.training.main import expand_short, main, one_message

FIELDS = {"step", "loss", "grad_norm", "lr", "tokens", "seconds", "tokens_per_s", "tflops", "mfu", "peak_gib"}


def tree(folder):
    """Every file below `folder` with its bytes."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- what a good run shows -----------------------------------------------------------------------------


def test_a_run_leaves_what_it_promises(trained_run):
    """config.yaml, records, checkpoints, TensorBoard with the inner loop of every layer, validation."""
    steps = records(trained_run)
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5, 6]
    assert all(set(r) - {"memory"} == FIELDS for r in steps)
    assert all(r["tokens"] == 96 and r["tflops"] > 0 and r["peak_gib"] > 0 for r in steps)
    inner = steps[3]["memory"]
    assert list(inner) == ["layer_1", "layer_2"]
    wanted = {
        "surprise",
        "state_norm",
        "momentum_norm",
        "keep",
        "momentum",
        "lr",
        "inner_loss_before",
        "inner_loss_after",
    }
    assert wanted <= set(inner["layer_1"])
    board = EventAccumulator(str(trained_run / "tb")).Reload().Tags()["scalars"]
    assert {"loss/train", "optim/lr", "perf/tokens_per_s", "memory/layer_2/surprise", "loss/val"} <= set(board)
    (validation,) = records(trained_run, "validation.jsonl")
    assert validation["step"] == 6 and validation["bits_per_byte"] > 0 and len(validation["by_position"]) == 4
    assert sorted(p.name for p in (trained_run / "checkpoints").iterdir()) == [
        "latest",
        "step_00000003",
        "step_00000006",
    ]
    assert "vocab_size: 257" in (trained_run / "config.yaml").read_text()


def test_bits_per_byte_are_the_nats_of_all_tokens_over_the_bytes(trained_run):
    """The one figure that can be compared over tokenizers; the ends of documents are predicted but are no bytes."""
    (got,) = records(trained_run, "validation.jsonl")
    assert got["bytes"] < got["tokens"]
    assert got["bits_per_byte"] == pytest.approx(got["loss"] * got["tokens"] / got["bytes"] / 0.6931471805599453)


def test_the_console_has_a_line_a_step(tmp_path, capsys):
    """step, loss, gradient norm, learning rate, tokens/s, time left; and at the end where everything lies."""
    assert main(tiny_config(tmp_path, training__steps=2)) == 0
    lines = capsys.readouterr().out.splitlines()
    pattern = r"step [12]/2 \| loss \d\.\d{4} \| grad norm \S+ \| lr \S+ \| \S+ tokens/s \| ETA \d+:\d\d"
    assert sum(bool(re.fullmatch(pattern, line)) for line in lines) == 2
    assert str(tmp_path / "run") in lines[-1]


def test_a_finished_run_says_so_and_changes_nothing(trained_run, capsys):
    """Typing the command again must not train on, nor lose anything."""
    config = str(trained_run / "config.yaml")
    before = tree(trained_run / "checkpoints")
    steps = learned(trained_run)
    assert main([config]) == 0
    assert "nothing left to do: training.steps = 6" in capsys.readouterr().out
    assert tree(trained_run / "checkpoints") == before
    assert learned(trained_run) == steps


def test_a_dry_run_shows_sizes_and_writes_nothing(tmp_path, capsys):
    """What one wants to know before asking for a cluster."""
    assert main([*tiny_config(tmp_path), "--dry-run"]) == 0
    out = capsys.readouterr().out
    for name in ("parameters:", "state:", "memory a rank:", "tokens a step:", "operations:"):
        assert name in out
    assert not (tmp_path / "run").exists()


def test_the_resolved_configuration_is_printed(tmp_path, capsys):
    """Overrides win, wherever they stand."""
    with pytest.raises(SystemExit) as stop:
        main(["--training.steps=77", *tiny_config(tmp_path), "--print_config"])
    assert stop.value.code == 0
    assert "steps: 77" in capsys.readouterr().out


def test_a_dry_run_sizes_a_layout_that_isnt_started(tmp_path, capsys):
    """Whoever asks a login node what eight GPUs would hold has one process."""
    words = [*tiny_config(tmp_path), "--parallel.tensor=2", "--parallel.context=2", "--dry-run"]
    assert main(words) == 0
    assert "4 = 1 data x 2 tensor x 1 pipeline x 2 context" in capsys.readouterr().out


def test_a_dry_run_reads_the_tokenizer_where_it_is_here(tmp_path, capsys):
    """A dry run that says all is well, before a run that is refused; but a login node may lack the file."""
    assert main([*tiny_config(tmp_path, model__vocab_size=100), "--dry-run"]) == 2
    assert "model.vocab_size = 100: data.tokenizer = 'bytes' has 257 tokens" in capsys.readouterr().err
    assert main([*tiny_config(tmp_path, model__vocab_size=100, data__tokenizer="not/here.json"), "--dry-run"]) == 0
    assert "note: data.tokenizer = 'not/here.json': not here, so model.vocab_size" in capsys.readouterr().out


@pytest.mark.parametrize("size", [10**14, 10**18, 10**25])
def test_a_model_that_doesnt_fit_is_told_with_the_way_out(tmp_path, capsys, size):
    """Somebody's typing error, or a laptop: torch's allocator ends in a traceback of C++ frames."""
    assert main(tiny_config(tmp_path, model__vocab_size=size)) == 2
    error = capsys.readouterr().err
    assert "the model doesn't fit into this rank's memory" in error and "--dry-run says how much" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_ends_well_and_the_run_goes_on(tmp_path, monkeypatch, capfd, number):
    """SLURM's time limit must cost no step: exit code 0, a checkpoint, and the next start continues."""
    step = loop.train_step

    def interrupted(job, number_of_step, **options):
        if number_of_step == 2:
            os.kill(os.getpid(), number)
        return step(job, number_of_step, **options)

    monkeypatch.setattr(loop, "train_step", interrupted)
    before = signal.getsignal(number)
    assert main(tiny_config(tmp_path, training__steps=4)) == 0
    told = capfd.readouterr()
    assert f"stopped by {number.name} after step 2" in told.out
    assert f"{number.name}: saves and stops after this step" in told.err  # at once: a step may take minutes
    assert signal.getsignal(number) is before
    assert [s for s, _, _ in learned(tmp_path / "run")] == [1, 2]
    monkeypatch.undo()
    assert main(tiny_config(tmp_path, training__steps=4)) == 0
    assert [s for s, _, _ in learned(tmp_path / "run")] == [1, 2, 3, 4]


def test_a_second_signal_changes_no_exit_code(tmp_path, monkeypatch):
    """It comes while the groups are taken down: a run that has saved would end as one that was lost."""
    step, down = loop.train_step, ParallelMesh.destroy

    def interrupted(job, number_of_step, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return step(job, number_of_step, **options)

    def destroy(mesh):
        os.kill(os.getpid(), signal.SIGTERM)
        down(mesh)

    monkeypatch.setattr(loop, "train_step", interrupted)
    monkeypatch.setattr(ParallelMesh, "destroy", destroy)
    assert main(tiny_config(tmp_path, training__steps=4)) == 0


def test_ctrl_c_is_one_line(tmp_path, monkeypatch, capsys):
    """Forty lines of traceback look like a fault of this program."""

    def interrupted(job, number_of_step, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "train_step", interrupted)
    assert main(tiny_config(tmp_path, training__steps=4)) == 130
    assert "miras-train: Ctrl-C: ends without saving" in capsys.readouterr().err


def test_an_error_of_a_library_keeps_its_traceback(tmp_path, monkeypatch):
    """A ValueError out of torch is no message to a user; hidden, nobody could mend it."""
    import torch

    monkeypatch.setattr(loop, "train_step", lambda *args, **options: torch.optim.AdamW([], lr=-1.0))
    with pytest.raises(ValueError, match="learning rate"):
        main(tiny_config(tmp_path))


def test_help_says_the_usage_once_and_generation_its_defaults(capsys):
    """Two usages that differ leave open which holds; and how much is written without --max-new?"""
    for command in (main, generate.main):
        with pytest.raises(SystemExit):
            command(["--help"])
    train, _, generation = capsys.readouterr().out.partition("usage: miras-generate")
    assert train.startswith("usage: miras-train CONFIG") and train.count("miras-train CONFIG [") == 1
    assert generation.count("(default: ") == 6


def test_short_names_of_fields():
    """--resume and --init-from, with a space or an equals sign."""
    assert expand_short(["a.yaml", "--resume", "never"]) == ["a.yaml", "--checkpoint.resume=never"]
    assert expand_short(["--init-from=x/y", "--dry-run"]) == ["--training.init_from=x/y", "--dry-run"]


def test_the_profile_switch_writes_a_trace(tmp_path):
    """Where the time goes, without touching the code."""
    changes = {"logging__profile": "true", "logging__profile_start": 2, "logging__profile_steps": 1}
    assert main(tiny_config(tmp_path, training__steps=3, **changes)) == 0
    assert (tmp_path / "run" / "profile" / "rank0.json.gz").stat().st_size > 1000


# -- starting from other weights -----------------------------------------------------------------------


def test_a_new_run_starts_from_weights_only(trained_run, tmp_path):
    """The way to longer contexts: weights go along; step, moments and data order begin anew."""
    changes = {"model__block": "mac", "training__steps": 1, "data__sequence_length": 48, "memory__horizon": 128}
    changes["optimizer__warmup_steps"] = 0
    assert main([*tiny_config(tmp_path, "old", **changes), "--init-from", str(trained_run)]) == 0
    assert main(tiny_config(tmp_path, "new", **changes)) == 0
    (old,), (new,) = records(tmp_path / "old"), records(tmp_path / "new")
    assert old["step"] == 1
    assert old["loss"] < new["loss"] - 0.5


def test_weights_of_another_shape_are_refused_by_name(trained_run, tmp_path, capsys):
    """Half a model loaded would train, badly."""
    changes = {"model__block": "mac", "model__hidden": 32}
    assert main([*tiny_config(tmp_path, **changes), "--init-from", str(trained_run)]) == 2
    error = capsys.readouterr().err
    assert "embedding.word_embeddings.weight: [320, 16] in the checkpoint, [320, 32] in this run" in error
    assert not (tmp_path / "run").exists()


# -- what users get wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__hiden": 8}, "model.hiden: unknown"),
        ({"model__hidden": "wide"}, "model.hidden = 'wide': must be"),
        ({"model__heads": 3}, "model.hidden = 16: not divisible by model.heads = 3"),
        ({"training__global_batch": 3}, "training.global_batch"),
        ({"memory__rule": "titan"}, "memory.rule = 'titan': unknown"),
        ({"memory__options": "{foo: 1}"}, "memory.options.foo: unknown choice"),
        ({"memory__options": "{retention: lq}"}, "momentum only goes with retention='decay'"),
        ({"data__train": "/nowhere/text"}, "/nowhere/text"),
        ({"data__tokenizer": "/nowhere/tokenizer.json"}, "data.tokenizer"),
        ({"model__vocab_size": 100}, "model.vocab_size = 100"),
        ({"data__split": "100,0,0", "data__validation": "/nowhere/val"}, "data.validation"),
        ({"checkpoint__resume": "/nowhere/run"}, "checkpoint.resume = /nowhere/run: does not exist"),
        ({"training__init_from": "/nowhere/run"}, "training.init_from = /nowhere/run: does not exist"),
        ({"parallel__tensor": 2}, "parallel.tensor"),
        ({"data__packing": "ordered", "model__block": "attention"}, 'data.packing = "ordered"'),
    ],
)
def test_mistakes_get_one_clear_message(tmp_path, capsys, changes, message):
    """Field or file, way out, exit code 2, no traceback, nothing written."""
    assert main(tiny_config(tmp_path, **changes)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_a_truncated_data_file_is_refused_by_name(tmp_path, capsys):
    """Reading past the end would train on noise."""
    argv = tiny_config(tmp_path)
    data = tmp_path / "text.bin"
    data.write_bytes(data.read_bytes()[:-100])
    assert main(argv) == 2
    assert "text.bin" in capsys.readouterr().err


def test_data_of_another_tokenizer_are_refused(tmp_path, capsys):
    """Ids of one vocabulary mean nothing in another."""
    from miras_megatron.training.manifest import Manifest, write_manifest

    argv = tiny_config(tmp_path)
    fields = {"vocab_size": 300, "eod": 299, "appends_eod": True, "dtype": "<u2", "documents": 24, "tokens": 1}
    write_manifest(
        tmp_path / "text", Manifest(tokenizer="other.json", tokenizer_digest="0" * 64, text_bytes=1, **fields)
    )
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert "other.json" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__conv": 0}, "model.conv: the checkpoint has 4, this run 0"),
        ({"data__seed": 9, "optimizer__beta2": 0.9}, "2 field(s) differ that may not"),
        ({"checkpoint__resume": "never"}, "holds a run already (config.yaml, metrics.jsonl, checkpoints)"),
    ],
)
def test_the_folder_of_another_run_is_left_alone(trained_run, tmp_path, capsys, changes, message):
    """Nothing is overwritten: not a byte."""
    same = {"training__steps": 6, "checkpoint__every": 3, "model__block": "mac", "logging__tensorboard": "true"}
    argv = tiny_config(trained_run.parent, **same, **changes)
    before = tree(trained_run)
    assert main(argv) == 2
    assert message in capsys.readouterr().err
    assert tree(trained_run) == before


def test_fields_that_may_change_on_resume_do(trained_run, tmp_path):
    """More steps, another rate, another rhythm of saving: the same run goes on."""
    copy = tmp_path / "run"
    shutil.copytree(trained_run, copy)
    argv = [str(copy / "config.yaml"), f"--run.dir={copy}", "--training.steps=7", "--optimizer.lr=0.02"]
    assert main([*argv, "--resume", str(copy / "checkpoints" / "step_00000003")]) == 0
    steps = learned(copy)
    assert [s for s, _, _ in steps] == [1, 2, 3, 4, 5, 6, 7]
    assert steps[:3] == learned(trained_run)[:3]
    assert records(copy)[3]["lr"] > records(trained_run)[3]["lr"]
    assert main([str(copy / "config.yaml"), "--training.steps=8"]) == 0
    assert [s for s, _, _ in learned(copy)] == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("name", ["__0_0.distcp", "common.pt", ".metadata", "config.yaml"])
def test_a_damaged_checkpoint_is_refused_by_name(trained_run, tmp_path, capsys, name):
    """A flipped bit in 100 GB must not become a slightly worse model; the message names the earlier one."""
    copy = tmp_path / "run"
    shutil.copytree(trained_run, copy)
    path = copy / "checkpoints" / "step_00000006" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    before = tree(copy)
    assert main([str(copy / "config.yaml"), f"--run.dir={copy}", "--training.steps=7"]) == 2
    error = capsys.readouterr().err
    assert f"{name} has changed since it was written" in error
    assert "step_00000003" in error
    assert tree(copy) == before


# -- generation ----------------------------------------------------------------------------------------


def test_miras_generate_writes_text_and_repeats_itself_with_a_seed(trained_run, capsys, tmp_path):
    """What a user sees: the text, the same for the same seed, and a session file that goes on."""
    options = [str(trained_run), "--prompt", "the ", "--max-new", "12", "--seed", "3", "--top-k", "5"]
    assert generate.main(options) == 0
    first = capsys.readouterr().out
    assert generate.main(options) == 0
    assert capsys.readouterr().out == first
    assert first.strip("\n")
    for _ in range(2):
        assert generate.main([*options, "--session", str(tmp_path / "session")]) == 0
    assert (tmp_path / "session").exists()


@pytest.mark.parametrize("path", ["nowhere", ""])
def test_a_run_without_checkpoint_is_refused_by_name(tmp_path, capsys, path):
    """One message, exit code 2, no traceback."""
    assert generate.main([str(tmp_path / path), "--prompt", "x"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("miras-generate: RUN = ")
    assert "Traceback" not in error


def test_generating_from_a_checkpoint_without_its_configuration_says_what_is_damaged(trained_run, tmp_path, capsys):
    """ "No such file: config.yaml" sounds as though the user should have given one."""
    shutil.copytree(trained_run / "checkpoints", tmp_path / "checkpoints")
    (tmp_path / "checkpoints" / "step_00000006" / "config.yaml").unlink()
    assert generate.main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "damaged checkpoint: " in error and "config.yaml is missing; go on from an earlier one" in error


def test_wrong_options_of_generation_are_refused_first(trained_run, tmp_path, capsys):
    """Not after the text was written and the state is lost; a negative temperature would prefer the unlikeliest."""
    assert generate.main([str(trained_run), "--session", str(tmp_path / "no" / "file")]) == 2
    assert "make it first" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        generate.main([str(trained_run), "--temperature", "-1"])
    assert stopped.value.code == 2


def test_a_dry_run_refuses_what_only_the_rule_knows(tmp_path, capsys):
    """A dry run that says all is well, before a run that is refused, has cost a queue's wait."""
    assert main([*tiny_config(tmp_path, memory__options="{retention: lq}"), "--dry-run"]) == 2
    assert "momentum only goes with retention='decay'" in capsys.readouterr().err


def test_a_record_is_plain_json(trained_run):
    """Any reader in any language."""
    for line in (trained_run / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.parametrize(("rank", "speaks"), [("0", True), ("3", False)])
def test_one_rank_a_machine_tells_a_wrong_configuration(tmp_path, capsys, monkeypatch, rank, speaks):
    """Eight times the same list buries it; every rank ends with 2 all the same."""
    torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    assert main(tiny_config(tmp_path, training__global_batch=8, optimizer__clip=-1)) == 2
    assert ("optimizer.clip = -1.0" in capsys.readouterr().err) == speaks
    assert main([str(tmp_path / "nowhere.yaml")]) == 2
    assert ("no such file" in capsys.readouterr().err) == speaks


HOLD = """\
import sys, time
from miras_megatron.config.load import load_run
from miras_megatron.training.run_folder import claimed_folder, find_start
run = load_run(sys.argv[1:])
with claimed_folder(run, find_start(run)):
    print("held", flush=True)
    time.sleep(600)
"""


def test_two_runs_dont_write_into_one_folder(tmp_path, capsys, monkeypatch):
    """A job queued twice mixes two runs' records and checkpoints; a killed one must not block its successor."""
    monkeypatch.setattr(run_folder, "PATIENCE", 0.2)
    changes = {"training__steps": 1, "checkpoint__every": 0, "data__split": "100,0,0", "model__vocab_size": 257}
    argv = tiny_config(tmp_path, **changes)
    with subprocess.Popen([sys.executable, "-c", HOLD, *argv], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == "held\n"
            code, error = main(argv), capsys.readouterr().err
        finally:
            other.kill()
    assert code == 2
    assert f"run.dir = {tmp_path / 'run'}: process {other.pid} on {socket.gethostname()} is running there" in error
    assert main(argv) == 0


@pytest.mark.parametrize("cut", [False, True])
def test_a_folder_that_another_run_used_meanwhile_is_left_alone(trained_run, tmp_path, capsys, monkeypatch, cut):
    """A model is built for minutes: a run that began and ended in them lost its configuration and its records."""
    begin = loop.begin

    def begin_late(job, start):
        shutil.copytree(trained_run, tmp_path / "run")
        if cut:
            shutil.rmtree(tmp_path / "run" / "checkpoints")
        (tmp_path / "run" / ".lock").unlink()
        return begin(job, start)

    monkeypatch.setattr(loop, "begin", begin_late)
    assert main(tiny_config(tmp_path)) == 2
    wanted = "holds another run" if cut else "another run changed it while this one was starting; run again"
    assert f"run.dir = {tmp_path / 'run'}: {wanted}" in capsys.readouterr().err
    assert (tmp_path / "run" / "config.yaml").read_bytes() == (trained_run / "config.yaml").read_bytes()
    assert learned(tmp_path / "run") == learned(trained_run)


@pytest.mark.parametrize(("error", "code"), [(RankLost("rank 0 waited at: saving"), 4), (NotANumber("loss is nan"), 3)])
def test_each_kind_of_end_has_its_exit_code(tmp_path, monkeypatch, capsys, error, code):
    """Schedulers start a run again whose rank was lost, and never one whose configuration is wrong."""

    def end(*_):
        raise error

    monkeypatch.setattr(loop, "begin", end)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "exit_code"))
    assert main(tiny_config(tmp_path)) == code
    assert str(error) in capsys.readouterr().err
    assert told_exit_code(tmp_path / "exit_code") == (None if code == 4 else code), "4 is what the victims say"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_never_comes_is_a_lost_rank(tmp_path, monkeypatch, capsys, rank):
    """A scheduler starts a run again whose machine did not come up; code 2 leaves it lying, with nothing to mend."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, str(value))
    assert main(tiny_config(tmp_path, parallel__timeout=1)) == 4
    who = "it waited for rank 0" if rank else "1 of 2 ranks did not come: 1"
    error = capsys.readouterr().err
    assert error.startswith(f"miras-train: rank {rank} ") and who in error and "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_what_the_terminal_cannot_show_ends_nothing(monkeypatch):
    """A model's folder of Chinese letters, and a terminal of ASCII: the folder was written, and the command said 2."""
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert one_message("miras-test", lambda: print("wrote \u6a21 \udcff", flush=True) or 0) == 0
    assert shown.getvalue() == b"wrote \\u6a21 \\udcff\n"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(28, "No space left on device", "there/file"), "miras-test: there/file: No space left on device"),
        (OSError("odd"), "miras-test: odd"),
    ],
)
def test_what_the_system_refuses_is_one_message(error, told, capsys):
    """A full temporary folder, a name that is too long: a traceback would say the same, with forty lines before."""

    def work():
        raise error

    assert one_message("miras-test", work) == 2
    assert capsys.readouterr().err.strip() == told
