"""Bytes of text that a token id stands for, wherever it stands: numbers that add up however a text is cut.

Decoding a slice of ids and counting its bytes would not do: a character cut in two decodes to U+FFFD on both sides,
and many tokenizers drop the space before whatever comes first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""What decoders with byte fallback call a single byte."""


def count_bytes(tokenizer: Tokenizer, ids: Tensor) -> int:
    """Bytes of UTF-8 text that token ids stand for; a document's end, and ids of no token, stand for none."""
    if tokenizer.digest not in _KNOWN:
        _KNOWN[tokenizer.digest] = token_sizes(tokenizer)
    sizes = _KNOWN[tokenizer.digest]
    return int(sizes[ids.cpu().clamp(max=len(sizes) - 1)].sum())


_KNOWN: dict[str, Tensor] = {}
"""A tokenizer's digest -> its sizes: a large vocabulary takes a second."""


def token_sizes(tokenizer: Tokenizer) -> Tensor:
    """int64 [vocab_size + 1]: bytes of each id after another token of its document; the last stands for no token.

    Where a tokenizer puts a space before the first word of a text, a document's first token counts that too.
    """
    if isinstance(tokenizer, JsonTokenizer):
        sizes = _sizes_of_json(tokenizer)
    else:
        assert isinstance(tokenizer, ByteTokenizer), tokenizer
        sizes = [1] * 256 + [0]
    return torch.tensor([*sizes, 0])


def _sizes_of_json(tokenizer: JsonTokenizer) -> list[int]:
    decoder = json.loads(tokenizer.library.to_str())["decoder"]
    kinds = set(_kinds(decoder))
    added = _added_by_each(tokenizer)
    for number, told in enumerate(added):
        text = tokenizer.library.id_to_token(number) or ""
        if told and "ByteLevel" in kinds:
            added[number] = len(text) if _alphabet().issuperset(text) else len(text.encode())
        elif told and "ByteFallback" in kinds and BYTE_TOKEN.fullmatch(text):
            added[number] = 1
    return added


def _added_by_each(tokenizer: JsonTokenizer) -> list[int]:
    """What each id adds to the bytes of a decoded text that has a word before it and one after it."""
    word = tokenizer.encode("a")
    alone = len(tokenizer.decode(word + word).encode())
    return [len(tokenizer.decode([*word, i, *word]).encode()) - alone for i in range(tokenizer.vocab_size)]


def _kinds(decoder: dict[str, Any] | None) -> Iterator[str]:
    """The types of a tokenizer.json's decoder and of all that it is made of."""
    if decoder is not None:
        yield decoder["type"]
        for part in decoder.get("decoders", []):
            yield from _kinds(part)


@lru_cache(maxsize=1)
def _alphabet() -> frozenset[str]:
    """The 256 characters that byte-level tokenizers write bytes with."""
    from tokenizers import pre_tokenizers

    return frozenset(pre_tokenizers.ByteLevel.alphabet())
