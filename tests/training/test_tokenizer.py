"""If these failed, text would come back changed, or two tokenizers would pass for one another."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from miras_megatron.training.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, load_tokenizer, train_bpe

TEXT = "Hello wörld, 你好 there 😀\n\n  two spaces\tand a tab <|endoftext|> \r\n end"


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> JsonTokenizer:
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    return train_bpe(iter(["hello there wörld 你好 and the other world " * 20, TEXT]), 330, path)


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request: pytest.FixtureRequest, bpe: JsonTokenizer) -> Tokenizer:
    return ByteTokenizer() if request.param == "bytes" else bpe


@pytest.mark.parametrize("text", [TEXT, "", " ", "\n", "a", "é", "\u0000", "😀" * 3, "x" * 1334])
def test_text_comes_back_as_it_was(tokenizer: Tokenizer, text: str) -> None:
    """Whatever is lost here is lost to the model."""
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eod not in ids, "the name of the end mark inside a text is text"
    assert all(0 <= token < tokenizer.vocab_size for token in ids)
    assert tokenizer.decode([*ids, tokenizer.eod]) == text


def test_ids_of_bytes_are_their_values() -> None:
    """Exports and kernels rely on it: id = byte, 256 ends a document."""
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("é!") == [0xC3, 0xA9, 0x21]
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)


def test_streaming_gives_the_same_text(tokenizer: Tokenizer) -> None:
    """Generation prints token by token; joined, it must be what decode gives, broken characters included."""
    chooser = random.Random(7)
    sequences = [tokenizer.encode(TEXT)]
    sequences += [[chooser.randrange(tokenizer.vocab_size) for _ in range(60)] for _ in range(50)]
    for ids in sequences:
        stream = tokenizer.stream()
        pieces = [stream.push(token) for token in ids]
        assert "".join(pieces) + stream.finish() == tokenizer.decode(ids)
    stream = ByteTokenizer().stream()
    assert [stream.push(token) for token in "né".encode()] == ["n", "", "é"]


def test_the_digest_sees_content_not_spelling(bpe: JsonTokenizer, tmp_path: Path) -> None:
    """A pretty-printed copy is the same tokenizer; a changed merge or end mark is another."""
    content = json.loads(Path(bpe.name).read_text(encoding="utf-8"))
    copy, other = tmp_path / "copy.json", tmp_path / "other.json"
    copy.write_text(json.dumps(content, indent=4), encoding="utf-8")
    assert JsonTokenizer(copy).digest == bpe.digest
    content["model"]["merges"] = content["model"]["merges"][:-1]
    other.write_text(json.dumps(content), encoding="utf-8")
    assert JsonTokenizer(other).digest != bpe.digest
    assert JsonTokenizer(copy, eod="H").digest != bpe.digest
    assert ByteTokenizer.digest != bpe.digest


def test_a_folder_and_its_configured_end_mark_are_found(bpe: JsonTokenizer, tmp_path: Path) -> None:
    """Hugging Face folders name their end mark in tokenizer_config.json."""
    (tmp_path / "tokenizer.json").write_text(Path(bpe.name).read_text(encoding="utf-8"), encoding="utf-8")
    assert load_tokenizer(str(tmp_path)).eod == bpe.eod
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "H"}}))
    assert load_tokenizer(str(tmp_path)).eod == bpe.encode("H")[0]


def test_what_is_no_tokenizer_is_refused(tmp_path: Path, bpe: JsonTokenizer) -> None:
    """The message names the field, the file and the way out."""
    with pytest.raises(ValueError, match=r'data.tokenizer = "nowhere": cannot be read.*give "bytes"'):
        load_tokenizer("nowhere")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="not a tokenizer.json"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ValueError, match=r"no end-of-document token \(looked for <none>.*--eod"):
        JsonTokenizer(bpe.name, eod="<none>")
    with pytest.raises(ValueError, match="257 ids at least"):
        train_bpe(iter(["a"]), 256, tmp_path / "t.json")
