"""If these failed, a long document would be cut into other tokens than its text has, at places nobody sees."""

from __future__ import annotations

import random

import numpy as np
import pytest
from miras_tools import encode
from miras_tools.encode import encode_pieces
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from miras_megatron.training.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, train_bpe

WORDS = "the of wörld 你好 running  \n\n \t 12345 don't end. 😀 ".split(" ")


def prose(length: int, seed: int = 1) -> str:
    chooser = random.Random(seed)
    text = " ".join(chooser.choice(WORDS) for _ in range(length))
    return text[:length]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    spiece = Library(models.BPE(unk_token="<unk>"))
    spiece.normalizer = normalizers.NFKC()
    spiece.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    spiece.decoder = decoders.Metaspace(prepend_scheme="first")
    spiece.train_from_iterator([prose(5000)], trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "</s>"]))
    spiece.save(str(folder / "spiece.json"))
    return {
        "bytes": ByteTokenizer(),
        "byte-level": train_bpe(iter([prose(5000)]), 320, folder / "bpe.json"),
        "metaspace": JsonTokenizer(folder / "spiece.json"),
    }


@pytest.mark.parametrize("name", ["bytes", "byte-level", "metaspace"])
@pytest.mark.parametrize("length", [0, 1, 63, 299, 300, 301, 1334, 5000])
@pytest.mark.parametrize("piece", [1, 7, 100, 6000])
def test_pieces_give_the_tokens_of_the_whole(
    tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch, name: str, length: int, piece: int
) -> None:
    """Windows far smaller than in use, so that there are many joints; every joint must be invisible."""
    monkeypatch.setattr(encode, "WINDOW", 200)
    monkeypatch.setattr(encode, "OVERLAP", 100)
    text = prose(length)
    pieces = [text[start : start + piece] for start in range(0, length, piece)]
    got = [token for ids in encode_pieces(tokenizers[name], pieces) for token in ids.tolist()]
    assert got == tokenizers[name].encode(text)


def test_a_text_without_any_border_is_cut_without_losing_a_character(
    tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A megabyte of base64 is one word: windows may disagree on tokens, never on text."""
    monkeypatch.setattr(encode, "WINDOW", 200)
    monkeypatch.setattr(encode, "OVERLAP", 100)
    chooser = random.Random(3)
    text = "".join(chooser.choice("runighed") for _ in range(3000))
    tokenizer = tokenizers["byte-level"]
    assert tokenizer.decode(np.concatenate(list(encode_pieces(tokenizer, [text]))).tolist()) == text


def test_lone_surrogates_become_replacement_characters(tokenizers: dict[str, Tokenizer]) -> None:
    """JSON can spell half a character; one such record must not end a night's work."""
    for tokenizer in (tokenizers["bytes"], tokenizers["byte-level"]):
        ids = np.concatenate(list(encode_pieces(tokenizer, ["a\ud800b 😀"])))
        assert tokenizer.decode(ids.tolist()) == "a\ufffdb 😀"
