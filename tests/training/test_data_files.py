"""If these failed, a run would read files that are cut short, of another tokenizer, or unlike megatron-core."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.data_sets import RAGGED, write_set
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

from miras_megatron.config.schema import Data, Run, RunFolder
from miras_megatron.training import shipped
from miras_megatron.training.data import build_batches
from miras_megatron.training.manifest import Manifest, manifest_path, write_manifest
from miras_megatron.training.shipped import _locked, prepare_shipped_text, shipped_documents
from miras_megatron.training.token_files import TokenFiles
from miras_megatron.training.token_writer import PairWriter, token_dtype
from miras_megatron.training.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
MANIFEST = Manifest(
    tokenizer="bytes",
    tokenizer_digest=BYTES.digest,
    vocab_size=257,
    eod=256,
    appends_eod=True,
    dtype="uint16",
    documents=3,
    tokens=9,
    text_bytes=6,
    largest_token=256,
)


@pytest.mark.parametrize("vocab_size", [257, 65499, 65500, 200000])
def test_the_pair_is_the_one_that_megatron_core_writes(tmp_path: Path, vocab_size: int) -> None:
    """Users keep such pairs for years and read them with other programs: every byte counts."""
    documents = [np.arange(length) + 200 for length in (1, 0, 700, 3)]
    with PairWriter(tmp_path / "ours", token_dtype(vocab_size)) as writer:
        for ids in documents:
            writer.add([ids[:2], ids[2:]])
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=DType.optimal_dtype(vocab_size))
    for ids in documents:
        builder.add_item(torch.from_numpy(ids))
        builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"ours{ending}").read_bytes() == (tmp_path / f"theirs{ending}").read_bytes()
    read = IndexedDataset(str(tmp_path / "ours"))
    assert all(np.array_equal(read[place], ids) for place, ids in enumerate(documents))


def test_documents_of_several_sequences_and_modes_are_read(tmp_path: Path) -> None:
    """Megatron's own preprocessing may cut documents into sentences; a document is what the index says it is."""
    builder = IndexedDatasetBuilder(str(tmp_path / "m.bin"), dtype=np.int32, multimodal=True)
    for document in ([[1, 2], [3]], [[4, 5, 6]]):
        for sentence in document:
            builder.add_item(torch.tensor(sentence), mode=1)
        builder.end_document()
    builder.finalize(str(tmp_path / "m.idx"))
    files = TokenFiles(str(tmp_path / "m"), vocab_size=7)
    assert files.lengths.tolist() == [3, 3]
    assert files.read(0, 1, 2).tolist() == [2, 3] and files.read(1, 0, 3).tolist() == [4, 5, 6]


def test_a_pair_without_manifest_is_read_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Existing Megatron data must work, but nobody vouches for its tokenizer."""
    with caplog.at_level(logging.WARNING):
        write_set(tmp_path, RAGGED)
    assert "set.manifest.json" in caplog.text and "not checked" in caplog.text


def test_prefixes_may_be_named_as_users_name_them(tmp_path: Path) -> None:
    """Megatron users type the prefix of preprocess_data, or complete a file name with the tab key."""
    write_set(tmp_path, [4, 5], "a_text_document")
    for name in ("a", "a_text_document", "a_text_document.bin", "a_text_document.idx"):
        assert TokenFiles(str(tmp_path / name), vocab_size=2000).lengths.tolist() == [4, 5]


DAMAGE = {
    "no files": (
        lambda p: [Path(f"{p}{e}").unlink() for e in (".bin", ".idx")],
        r"there is no .*set.idx.*miras-preprocess",
    ),
    "no .idx": (lambda p: Path(f"{p}.idx").unlink(), r"set.idx is missing \(.*set.bin is there\)"),
    "no .bin": (lambda p: Path(f"{p}.bin").unlink(), r"set.bin is missing"),
    "short .bin": (lambda p: _cut(f"{p}.bin", -3), r"set.bin is truncated: 597 bytes, the index says 600.*--overwrite"),
    "empty .bin": (lambda p: _cut(f"{p}.bin", 0), r"set.bin is empty"),
    "short .idx": (lambda p: _cut(f"{p}.idx", -1), r"set.idx is truncated: \d+ bytes, its counts say \d+"),
    "shorter .idx": (lambda p: _cut(f"{p}.idx", 20), r"set.idx is truncated: 20 bytes, its header alone has 34"),
    "no index": (lambda p: Path(f"{p}.idx").write_bytes(b"x" * 99), r"set.idx is not a Megatron index"),
    "longer .bin": (lambda p: Path(f"{p}.bin").write_bytes(b"x" * 999), r"set.bin is longer than its index"),
    "bad offsets": (lambda p: _poke(f"{p}.idx", 34 + 40 + 8), r"set.idx is damaged: offsets"),
    "bad documents": (lambda p: _poke(f"{p}.idx", -8), r"set.idx is damaged: impossible documents"),
    "bad manifest": (lambda p: manifest_path(p).write_text("{}"), r"set.manifest.json: not a manifest"),
}


def _cut(path: str, size: int) -> None:
    content = Path(path).read_bytes()
    Path(path).write_bytes(content[:size])


def _poke(path: str, place: int) -> None:
    content = bytearray(Path(path).read_bytes())
    content[place] ^= 1
    Path(path).write_bytes(bytes(content))


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_refused_by_name(tmp_path: Path, damage: str) -> None:
    """A file that is cut short reads as garbage or kills the process in the middle of a run."""
    write_set(tmp_path, RAGGED)
    prefix = str(tmp_path / "set")
    harm, message = DAMAGE[damage]
    harm(prefix)
    with pytest.raises(ValueError, match=r"(?s)(data.train = .*)?" + message):
        TokenFiles(prefix, vocab_size=20000)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """Ids of one tokenizer mean nothing to another; the loss would look almost right."""
    prefix = write_set(tmp_path, [3, 3, 3]).prefix
    write_manifest(prefix, replace(MANIFEST, tokenizer="gpt2/tokenizer.json", tokenizer_digest="f" * 64))
    with pytest.raises(
        ValueError, match=r"data.train = .*gpt2/tokenizer.json.*ffff.*data.tokenizer hashes to .*set data.token"
    ):
        TokenFiles(prefix, vocab_size=5000, tokenizer_digest=BYTES.digest)
    write_manifest(prefix, MANIFEST)
    TokenFiles(prefix, vocab_size=5000, tokenizer_digest=BYTES.digest)
    with pytest.raises(ValueError, match=r"token id 256, outside the vocabulary of 100.*model.vocab_size must be 257"):
        TokenFiles(prefix, vocab_size=100, tokenizer_digest=BYTES.digest)


def test_ids_beyond_the_vocabulary_are_refused_where_they_are_read(tmp_path: Path) -> None:
    """Without a manifest nobody knows the largest id; the embedding would read beyond its table."""
    write_set(tmp_path, [4, 4])
    files = TokenFiles(str(tmp_path / "set"), vocab_size=1001)
    assert files.read(1, 0, 1).tolist() == [1000]
    with pytest.raises(
        ValueError, match=r"set.bin: document 1 holds token id 1003.*vocabulary of 1001.*data.tokenizer"
    ):
        files.read(1, 0, 4)


def test_masks_of_other_documents_are_refused(tmp_path: Path) -> None:
    """A mask left over from another set would hide the wrong tokens."""
    with pytest.raises(ValueError, match="loss_mask.idx: its documents differ in length"):
        write_set(tmp_path, [4, 4], masks=[np.ones(4), np.ones(3)])


def test_the_shipped_text_is_prepared_once_by_whoever_comes_first(tmp_path: Path) -> None:
    """The first command of a new user: several ranks start at once and must see whole files."""
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(prepare_shipped_text(tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4 and len(set(found)) == 1
    files = TokenFiles(found[0], vocab_size=257, tokenizer_digest=BYTES.digest)
    texts = shipped_documents()
    assert len(files.lengths) == len(texts) == 92
    assert BYTES.decode(files.read(91, 0, int(files.lengths[91])).tolist()) == texts[91]
    assert not list(tmp_path.glob("*.tmp*"))


def test_every_node_builds_its_own_cache_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of three ranks, data.cache on each node's own disk: one rank a node writes, all read the same rows."""
    built: list[str] = []

    def counted(prefix: str, *rest: object) -> None:
        built.append(Path(prefix).parent.name)
        write(prefix, *rest)

    write = shipped._write_documents
    monkeypatch.setattr(shipped, "_write_documents", counted)
    rows: dict[int, torch.Tensor] = {}

    def train(rank: int) -> None:
        data = Data(train="shipped", cache=str(tmp_path / f"node{rank // 3}"), sequence_length=32, split="98,1,1")
        rows[rank] = next(build_batches(replace(Run(), data=data), BYTES, micro_batch=2)).tokens

    ranks = [threading.Thread(target=train, args=(rank,)) for rank in range(6)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert sorted(built) == ["node0", "node1"]
    assert len(rows) == 6 and all(torch.equal(rows[0], tokens) for tokens in rows.values())


def test_waiting_for_the_shipped_text_ends_and_names_who_is_waited_for(tmp_path: Path) -> None:
    """A rank that hangs without a word costs a cluster."""
    lock = tmp_path / f"shipped_{BYTES.digest[:12]}_text_document.lock"
    with _locked(lock, 1.0), pytest.raises(TimeoutError, match=r"waited 0.2 s for process \d+ on .*data.cache"):
        prepare_shipped_text(tmp_path, timeout=0.2)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """A read-only home is common on clusters."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match="data.cache: .*file/cache"):
        prepare_shipped_text(tmp_path / "file" / "cache")


def test_a_run_folder_that_cant_be_written_is_named_as_such(tmp_path: Path) -> None:
    """Without a data.cache the text lies in the run's folder, and that is the field to change."""
    (tmp_path / "file").write_text("in the way")
    run = Run(
        run=RunFolder(dir=str(tmp_path / "file" / "run")),
        data=Data(train="shipped", sequence_length=32, split="98,1,1"),
    )
    with pytest.raises(ValueError, match="run.dir = .*file/run: .*can't be written"):
        build_batches(run, BYTES)


@pytest.mark.parametrize("part", ["train", "validation"])
def test_a_configuration_becomes_batches(tmp_path: Path, part: str) -> None:
    """The road that `miras-train` takes: the shipped text by name, split and packed as the fields say."""
    run = Run()
    run = replace(run, data=Data(train="shipped", cache=str(tmp_path), sequence_length=32, split="98,1,1"))
    batches = build_batches(run, BYTES, part=part, micro_batch=3)
    batch = next(batches)
    assert batch.tokens.shape == (3, 32) and int(batch.tokens.max()) <= 256
    files = replace(run, data=replace(run.data, train="nowhere/at_all"))
    with pytest.raises(ValueError, match="data.train = 'nowhere/at_all'"):
        build_batches(files, BYTES)
