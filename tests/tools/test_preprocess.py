"""If these failed, a corpus would lose or change text, or a killed night of work would start again."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from megatron.core.datasets.indexed_dataset import IndexedDataset
from miras_tools import preprocess_parts
from miras_tools.preprocess import main

from miras_megatron.training.data import Batches, MixedSamples
from miras_megatron.training.manifest import read_manifest
from miras_megatron.training.token_files import TokenFiles
from miras_megatron.training.tokenizer import ByteTokenizer, load_tokenizer

BYTES = ByteTokenizer()
TEXTS = ["one", "zwei\nlines", "drei 三", "four " * 300, "x"]


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def documents(prefix: Path) -> list[str]:
    """Texts of a written set, each checked to end with the eod."""
    pair = IndexedDataset(f"{prefix}_text_document")
    ids = [pair[place].tolist() for place in range(len(pair))]
    assert all(tokens[-1] == BYTES.eod for tokens in ids)
    return [BYTES.decode(tokens) for tokens in ids]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but the manifest, whose plan hash holds the sources' times."""
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file() and ".json" not in path.name}


def write_jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": 1, key: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def write_all_kinds(folder: Path) -> dict[str, Path]:
    plain = write_jsonl(folder / "a.jsonl", TEXTS)
    packed = {"jsonl": plain, "jsonl.gz": folder / "b.jsonl.gz", "jsonl.zst": folder / "c.jsonl.zst"}
    packed["jsonl.gz"].write_bytes(gzip.compress(plain.read_bytes()))
    halves = [zstandard.compress(plain.read_bytes()[:50]), zstandard.compress(plain.read_bytes()[50:])]
    packed["jsonl.zst"].write_bytes(b"".join(halves))
    table = pyarrow.table({"url": ["u"] * len(TEXTS), "text": TEXTS})
    pyarrow.parquet.write_table(table, folder / "d.parquet", row_group_size=2)
    with pyarrow.OSFile(str(folder / "e.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    (folder / "f.txt").write_text("\f".join(TEXTS), encoding="utf-8")
    (folder / "g.txt.gz").write_bytes(gzip.compress("\f".join(TEXTS).encode("utf-8")))
    return {
        **packed,
        "parquet": folder / "d.parquet",
        "arrow": folder / "e.arrow",
        "txt": folder / "f.txt",
        "txt.gz": folder / "g.txt.gz",
    }


def test_every_kind_gives_the_same_set(tmp_path: Path) -> None:
    """Users hold their text in many kinds of file; the kind must not change a byte, nor may the number of workers."""
    kinds = write_all_kinds(tmp_path)
    wanted = None
    for kind, path in kinds.items():
        out = tmp_path / f"out-{kind}" / "set"
        code = run("--input", path, "--output-prefix", out, "--txt-documents", "form-feed", "--workers", 1)
        assert code == 0 and documents(out) == TEXTS
        wanted = wanted or contents(out.parent)
        assert contents(out.parent) == wanted
    out = tmp_path / "many" / "set"
    arguments = ["--input", *kinds.values(), "--unit-bytes", 500, "--workers", 2, "--txt-documents", "form-feed"]
    assert run(*arguments, "--output-prefix", out) == 0
    assert documents(out) == TEXTS * len(kinds)
    manifest = read_manifest(f"{out}_text_document")
    assert manifest is not None and manifest.documents == len(TEXTS) * len(kinds)
    assert [entry["documents"] for entry in manifest.sources] == [len(TEXTS)] * len(kinds)
    assert run("--verify", out) == 0


@pytest.mark.parametrize("mode", ["file", "line", "blank-line"])
def test_text_files_are_cut_as_asked(tmp_path: Path, mode: str) -> None:
    """A document is where state starts anew: the user says what one is."""
    text = "\ufeffone\r\ntwo\r\n\r\n\r\nthree\r\n"
    (tmp_path / "a.txt").write_bytes(text.encode("utf-8"))
    assert run("--input", tmp_path, "--output-prefix", tmp_path / "o", "--txt-documents", mode, "--workers", 1) == 0
    wanted = {"file": [text[1:]], "line": ["one", "two", "three"], "blank-line": ["one\ntwo", "three"]}
    assert documents(tmp_path / "o") == wanted[mode]


@pytest.mark.parametrize("unit_bytes", [1, 7, 64, 1000])
def test_jsonl_may_be_cut_anywhere(tmp_path: Path, unit_bytes: int) -> None:
    """A big file is read in parallel; a record on a cut must appear once, wherever the cut falls."""
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS[:3] + ["y" * 30])
    arguments = ["--input", path, "--output-prefix", tmp_path / "o", "--unit-bytes", unit_bytes, "--workers", 1]
    assert run(*arguments) == 0
    assert documents(tmp_path / "o") == TEXTS[:3] + ["y" * 30]


def test_a_killed_run_is_finished_by_the_same_command(tmp_path: Path) -> None:
    """Kill it for real, twice, in the middle of its work: what comes out is what one quiet run gives."""
    source = write_jsonl(tmp_path / "a.jsonl", [f"document {number} " * 200 for number in range(240)])
    arguments = ["--input", str(source), "--unit-bytes", "60000", "--workers", "2", "--train-bpe", "300"]
    arguments += ["--train-bpe-bytes", "6000"]
    assert run(*arguments, "--output-prefix", tmp_path / "quiet" / "set") == 0
    command = [
        sys.executable,
        "-m",
        "miras_tools.preprocess",
        *arguments,
        "--output-prefix",
        tmp_path / "killed" / "set",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    parts = tmp_path / "killed" / "set_text_document.parts"
    for units in (1, 4):
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        wait_for(lambda units=units: len(list(parts.glob("0*.json"))) >= units, process)
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL
        assert not psutil.wait_procs(workers, timeout=20)[1], "workers of a killed run must not live on"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "going on with" in done.stderr
    assert contents(tmp_path / "killed") == contents(tmp_path / "quiet")
    assert not parts.exists()


def wait_for(condition: object, process: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + 120
    while not condition():  # type: ignore[operator]
        assert process.poll() is None, "ended before it could be killed"
        assert time.monotonic() < give_up, "did not come so far within 120 s"
        time.sleep(0.002)


class Killed(BaseException):
    """Stands for a kill: nothing catches it, no cleaning up runs after it."""


def test_a_kill_at_any_rename_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every state that a kill can leave on the disk lies between two renames; all of them are tried."""
    lines = [json.dumps({"text": "plain"}), json.dumps({"prompt": "ask", "completion": "tell"})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    arguments = ["--input", tmp_path / "a.jsonl", "--unit-bytes", 20, "--workers", 1, "--train-bpe", 270]
    assert run(*arguments, "--output-prefix", tmp_path / "quiet" / "set") == 0
    real, killed_at, step = os.replace, 0, 0
    while killed_at < 60:
        out = tmp_path / f"killed-{killed_at}"
        step = 0

        def replace(source: object, target: object, at: int = killed_at) -> None:
            nonlocal step
            if step == at:
                raise Killed
            step += 1
            real(source, target)  # type: ignore[arg-type]

        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", replace)
            try:
                run(*arguments, "--output-prefix", out / "set")
                break
            except Killed:
                pass
        assert run(*arguments, "--output-prefix", out / "set") == 0
        assert contents(out) == contents(tmp_path / "quiet")
        assert not list(out.glob("*.parts"))
        killed_at += 1
    assert 12 < killed_at < 60


def test_an_unfinished_run_is_not_mixed_with_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of a set cut by one tokenizer and half by another would pass every check."""
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    parts = preprocess_parts.Parts(str(tmp_path / "o_text_document"))
    parts.open({"sources": [], "tokenizer": "other"})
    parts._lock.close()  # type: ignore[union-attr]
    assert run("--input", source, "--output-prefix", tmp_path / "o") == 2
    assert "an unfinished run with other sources, tokenizer" in capsys.readouterr().err
    parts.open({"sources": [], "tokenizer": "other"})
    assert run("--input", source, "--output-prefix", tmp_path / "o") == 2
    assert "another miras-preprocess works there" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_memory_does_not_grow_with_a_document(tmp_path: Path, kind: str) -> None:
    """A document of 100 million characters must not take a machine down; measured as the process's peak."""
    peaks = {}
    for megabytes in (1, 24):
        text = "some words of a very long document " * (megabytes * 1_000_000 // 35)
        path = tmp_path / f"{megabytes}.{kind}"
        path.write_text(text if kind == "txt" else json.dumps({"text": text}))
        code = (
            "import re, sys; from miras_tools.preprocess import main; code = main(sys.argv[1:]); "
            "print('peak', re.search('VmHWM:(.*) kB', open('/proc/self/status').read())[1]); sys.exit(code)"
        )
        arguments = ["--input", str(path), "--output-prefix", str(tmp_path / f"o{megabytes}"), "--workers", "1"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        peaks[megabytes] = int(done.stdout.split("peak")[1]) // 1024
    held = 0 if kind == "txt" else 4 * 23
    assert peaks[24] - peaks[1] < 12 + held, f"peaks in MiB: {peaks}; a jsonl record is held, its tokens are not"


def test_prompts_are_masked_and_the_mask_comes_back(tmp_path: Path) -> None:
    """Training on prompts teaches the user's half of a conversation."""
    records = [{"text": "plain"}, {"prompt": "ask é?", "completion": "tell"}, {"prompt": "", "completion": "only"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    assert run("--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "o", "--workers", 1) == 0
    files = TokenFiles(str(tmp_path / "o"), vocab_size=257, tokenizer_digest=BYTES.digest)
    assert files.has_masks and files.manifest is not None and files.manifest.loss_mask
    asked = len("ask é?".encode())
    wanted = [[1] * 6, [0] * asked + [1] * 5, [1] * 5]
    assert [files.read_mask(d, 0, int(files.lengths[d])).tolist() for d in range(3)] == wanted
    assert documents(tmp_path / "o") == ["plain", "ask é?tell", "only"]
    samples = MixedSamples([files], [1.0], length=sum(map(len, wanted)) - 1, packing="plain")
    batch = Batches(samples, micro_batch=1).batch(0)
    assert int(batch.loss_mask.sum()) in (16, 15), "all but the prompt, and the first token of the row"
    again = ["--input", write_jsonl(tmp_path / "b.jsonl", TEXTS), "--output-prefix", tmp_path / "o", "--overwrite"]
    assert run(*again, "--workers", 1) == 0
    assert not TokenFiles(str(tmp_path / "o"), vocab_size=257).has_masks, "no mask of the old set is left"


def test_a_bpe_is_trained_stored_and_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One command from text to subwords; the manifest says which tokenizer a run has to name."""
    source = write_jsonl(tmp_path / "a.jsonl", [f"the other brother {n} goes there" for n in range(50)])
    assert run("--input", source, "--output-prefix", tmp_path / "o", "--train-bpe", 300, "--workers", 1) == 0
    tokenizer = load_tokenizer(str(tmp_path / "o_tokenizer.json"))
    files = TokenFiles(str(tmp_path / "o"), vocab_size=tokenizer.vocab_size, tokenizer_digest=tokenizer.digest)
    assert tokenizer.decode(files.read(7, 0, int(files.lengths[7])).tolist()) == "the other brother 7 goes there"
    assert files.manifest is not None and files.manifest.text_bytes / files.manifest.tokens > 2
    assert "--data.tokenizer=" in capsys.readouterr().out
    again = ["--input", source, "--output-prefix", tmp_path / "p", "--tokenizer", tmp_path / "o_tokenizer.json"]
    assert run(*again, "--workers", 1) == 0
    assert (tmp_path / "p_text_document.bin").read_bytes() == (tmp_path / "o_text_document.bin").read_bytes()


def test_half_a_character_becomes_the_replacement_character(tmp_path: Path) -> None:
    """JSON can spell it, UTF-8 can't hold it: bits per byte divide by the bytes that are there, not by others."""
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a\\ud800b"}\n')
    assert run("--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "o", "--workers", 1) == 0
    assert documents(tmp_path / "o") == ["a\ufffdb"]
    manifest = read_manifest(tmp_path / "o_text_document")
    assert manifest is not None and (manifest.tokens, manifest.text_bytes) == (6, 5)


def test_the_next_command_of_one_document_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A single book can't be shared out: the command that was shown was refused."""
    for texts, split in ((TEXTS[:1], True), (TEXTS, False)):
        source = write_jsonl(tmp_path / f"{len(texts)}.jsonl", texts)
        assert run("--input", source, "--output-prefix", tmp_path / source.stem, "--workers", 1) == 0
        assert capsys.readouterr().out.rstrip().endswith("--data.tokenizer=bytes --data.split=100,0,0") == split


def test_a_dry_run_counts_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes and lengths before a night's work."""
    source = write_jsonl(tmp_path / "a.jsonl", [*TEXTS, ""])
    assert run("--input", source, "--dry-run", "--workers", 1) == 0
    output = capsys.readouterr().out
    tokens = sum(len(text.encode()) + 1 for text in TEXTS)
    assert f"{tokens:,}" in output and "(1 empty ones left out)" in output and "1,024 - 2,047" in output
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def _truncated(name: str) -> bytes:
    content = (json.dumps({"text": "abc " * 5000}) + "\n").encode() * 30
    rng = np.random.default_rng(0).integers(97, 123, 50_000, dtype=np.uint8).tobytes()
    content += b'{"text": "' + rng + b'"}\n'
    return (gzip.compress(content) if name.endswith("gz") else zstandard.compress(content))[:-500]


BAD: dict[str, tuple[str, bytes, list[str], str]] = {
    "not JSON": ("a.jsonl", b'{"text": "a"}\n{"text": \n', [], r"a.jsonl, line 2: not JSON"),
    "not an object": ("a.jsonl", b"\n[1]\n", [], r"a.jsonl, line 2: list, not an object"),
    "no text": (
        "a.jsonl",
        b'{"body": "a"}',
        [],
        r"a.jsonl, line 1: has no 'text' but body; name the field with --text-key",
    ),
    "no completion": ("a.jsonl", b'{"prompt": "a"}', [], r"line 1: has no 'completion' but prompt"),
    "nested": ("a.jsonl", b'{"text": ' + b"[" * 99_999 + b"}\n", [], r"line 1: nested too deep to be read; correct"),
    "number": ("a.jsonl", b'{"text": 3}', [], r"line 1: 'text' is int, not text"),
    "latin-1": ("a.txt", "caf\xe9 noir".encode("latin-1"), [], r"a.txt: not UTF-8 near byte \d"),
    "latin-1 jsonl": ("a.jsonl", b'{"text": "caf\xe9"}', [], r"line 1: not UTF-8"),
    "short gz": ("a.jsonl.gz", _truncated("gz"), [], r"a.jsonl.gz: cannot be read .*damaged or cut short"),
    "short zst": ("a.jsonl.zst", _truncated("zst"), [], r"a.jsonl.zst: cannot be read .*zstd frame"),
    "no gz": ("a.txt.gz", b"plain", [], r"a.txt.gz: cannot be read"),
    "no parquet": ("a.parquet", b"PAR1 nothing", [], r"a.parquet: not a whole parquet file"),
    "ending": ("a.pdf", b"%PDF", [], r"a.pdf: unknown ending; rename it to one of .txt"),
    "empty": ("a.txt", b"", [], r"holds no text"),
    "tokenizer": ("a.txt", b"a", ["--tokenizer", "nowhere.json"], r'"nowhere.json": cannot be read'),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("workers", [1, 2])
def test_bad_input_is_one_line_and_leaves_nothing(
    tmp_path: Path, case: str, workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first thing that goes wrong for a user is their own file: say which, where, and what to do."""
    name, content, arguments, message = BAD[case]
    if workers == 2 and case not in ("not JSON", "short zst"):
        workers = 1
    (tmp_path / name).write_bytes(content)
    sources = [tmp_path / name]
    if workers == 2:
        sources.insert(0, write_jsonl(tmp_path / "0.jsonl", TEXTS))
        arguments = ["--unit-bytes", "10"]
    out = tmp_path / "out" / "set"
    before = sorted(tmp_path.iterdir())
    assert run("--input", *sources, "--output-prefix", out, "--workers", workers, *arguments) == 2
    error = capsys.readouterr().err.strip()
    assert len([line for line in error.splitlines() if line.startswith("miras-preprocess: error:")]) == 1
    assert re.search(message, error) and "Traceback" not in error
    assert sorted(path for path in tmp_path.iterdir() if path.name != "out") == before
    assert not list((tmp_path / "out").rglob("*"))


def test_what_is_there_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A typo in a prefix must not cost last week's corpus."""
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    arguments = ["--input", source, "--output-prefix", tmp_path / "o", "--workers", 1]
    assert run(*arguments) == 0
    before = contents(tmp_path)
    assert run(*arguments) == 0 and "whole already" in capsys.readouterr().out
    assert run(*arguments, "--no-append-eod") == 2
    assert "is there already" in capsys.readouterr().err and contents(tmp_path) == before
    assert run(*arguments, "--no-append-eod", "--overwrite") == 0
    assert len(contents(tmp_path)["o_text_document.bin"]) < len(before["o_text_document.bin"])
    path = tmp_path / "o_text_document.bin"
    path.write_bytes(b"\0" + path.read_bytes()[1:])
    assert run("--verify", tmp_path / "o") == 2
    assert "o_text_document.bin differs from its manifest" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--input is required"),
        (["--input", "a"], "--output-prefix is required"),
        (
            ["--input", "a", "--output-prefix", "data/"],
            "--output-prefix data/: a folder; add a name, such as data/book",
        ),
        (["--input", "a", "--dry-run", "--train-bpe", "5"], "257 or more"),
        (["--input", "a", "--dry-run", "--workers", "0"], "--workers 0: 1 or more"),
    ],
)
def test_a_wrong_command_line_ends_with_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scripts tell a wrong call from a failed run by the code."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_inputs_that_match_nothing_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty glob in a script must not become an empty corpus."""
    for entry in (tmp_path / "*.jsonl", tmp_path, tmp_path / "gone.txt"):
        assert run("--input", entry, "--dry-run") == 2
        assert f"--input {entry}: " in capsys.readouterr().err


def test_progress_off_a_terminal_is_plain_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cluster logs are files; carriage returns make them unreadable."""
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    arguments = ["--input", source, "--dry-run", "--workers", 1, "--unit-bytes", 40, "--log-interval", 0]
    assert run(*arguments) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 3 and all("units" in line and "\r" not in line for line in lines)
