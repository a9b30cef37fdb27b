"""Bits per byte are comparable over tokenizers and layouts only if the bytes are the text's, however it is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from miras_megatron.training.token_sizes import count_bytes, token_sizes
from miras_megatron.training.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, train_bpe

TEXT = "The memory keeps what surprises it — même en français, 記憶 🧠!"


def save(folder: Path, library: Any) -> JsonTokenizer:
    """A tokenizer made by hand, with the end of a document in it."""
    library.add_special_tokens(["</s>"])
    library.save(str(folder / "tokenizer.json"))
    return JsonTokenizer(folder / "tokenizer.json", "</s>")


def byte_level(folder: Path) -> JsonTokenizer:
    """Merges learned from Latin letters: most characters of TEXT beyond them are several tokens."""
    return train_bpe(iter([TEXT[:30]] * 20), 290, folder / "tokenizer.json")


def byte_fallback(folder: Path) -> JsonTokenizer:
    """As Llama's: spaces are marks, the first one is no space, unknown characters are bytes."""
    known = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *sorted(set("The memory keeps what a") - {" "})]
    library = Library(
        models.BPE({token: i for i, token in enumerate(known)}, [], byte_fallback=True, unk_token="<unk>")
    )
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(parts)
    return save(folder, library)


@pytest.mark.parametrize("make", [lambda folder: ByteTokenizer(), byte_level, byte_fallback])
def test_any_two_parts_of_a_text_have_its_bytes(tmp_path: Path, make: Any) -> None:
    """A rank that holds a slice may begin in the middle of a character, or where a space would be dropped."""
    tokenizer: Tokenizer = make(tmp_path)
    before = tokenizer.encode("a")
    ids = torch.tensor(tokenizer.encode("a" + TEXT)[len(before) :])
    assert tokenizer.decode([*before, *ids.tolist()]) == "a" + TEXT
    for cut in range(len(ids) + 1):
        parts = [count_bytes(tokenizer, ids[:cut]), count_bytes(tokenizer, ids[cut:])]
        assert sum(parts) == len(TEXT.encode()), cut


@pytest.mark.parametrize("make", [lambda folder: ByteTokenizer(), byte_level, byte_fallback])
def test_what_is_no_text_has_no_bytes(tmp_path: Path, make: Any) -> None:
    """The end of a document, and rows that only pad the embedding."""
    tokenizer: Tokenizer = make(tmp_path)
    assert count_bytes(tokenizer, torch.tensor([tokenizer.eod, tokenizer.vocab_size, tokenizer.vocab_size + 7])) == 0
    assert token_sizes(tokenizer).shape == (tokenizer.vocab_size + 1,)


def test_a_mark_that_joins_pieces_of_words_is_no_text(tmp_path: Path) -> None:
    """WordPiece: `##s` is one byte, and a word of its own brings the space before it."""
    library = Library(models.WordPiece({"[UNK]": 0, "a": 1, "memory": 2, "##s": 3}, unk_token="[UNK]"))
    library.pre_tokenizer, library.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    tokenizer = save(tmp_path, library)
    assert count_bytes(tokenizer, torch.tensor([2, 3])) == len(b" memorys")
