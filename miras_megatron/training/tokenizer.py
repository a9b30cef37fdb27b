"""Text to token ids and back: raw bytes, or any Hugging Face tokenizer.json (trained BPE included).

No torch here: preprocessing workers import this file. A tokenizer is known by its `digest`, which data
manifests and checkpoints hold, so that text cut by one tokenizer is never trained on with another.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from ..config.schema import Run

EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<eod>", "<|eod|>", "</s>", "<eos>", "<|im_end|>", "[EOS]", "[SEP]")


class Tokenizer(Protocol):
    """What the trainer, the generator and the preprocessor need of a tokenizer.

    vocab_size  largest id + 1, before padding for the embedding
    eod         id that ends a document; never the result of encoding text
    digest      sha256 (hex) of everything that decides ids
    """

    name: str
    vocab_size: int
    eod: int
    digest: str

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without any special token added; special names inside the text are plain text."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; the eod and other special ids give nothing, broken UTF-8 gives U+FFFD."""

    def stream(self) -> StreamDecoder:
        """A decoder that is fed one id at a time."""


class StreamDecoder(Protocol):
    """Gives out text as soon as it is whole; all pieces joined equal `decode` of all ids."""

    def push(self, token: int) -> str:
        """Text that `token` completes; empty while a character is incomplete."""

    def finish(self) -> str:
        """What is still held back, with U+FFFD for a broken end."""


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8 text; 256 ends a document."""

    name = "bytes"
    vocab_size = 257
    eod = 256
    digest = hashlib.sha256(b"miras bytes 1: ids 0-255 are byte values, 256 ends a document").hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")

    def stream(self) -> ByteStream:
        return ByteStream()


class ByteStream:
    """StreamDecoder of ByteTokenizer."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(bytes([token])) if 0 <= token < 256 else ""

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class JsonTokenizer:
    """A tokenizer.json of the `tokenizers` library."""

    def __init__(self, path: str | Path, eod: str | None = None) -> None:
        """Read `path`; `eod` names the token that ends a document (None: from tokenizer_config.json or a known name).

        Raises ValueError when the file cannot be read or no end-of-document token is found.
        """
        self.name = str(path)
        text = _read_text(Path(path))
        self.library = _parse(text, path)
        self.library.no_truncation()
        self.library.no_padding()
        self.library.encode_special_tokens = True
        vocabulary = self.library.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.eod = _find_eod(vocabulary, Path(path), eod)
        self.digest = _digest(text, self.eod)

    def encode(self, text: str) -> list[int]:
        return list(self.library.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids and, for each, the [start, end) characters of `text` it stands for."""
        encoding = self.library.encode(text, add_special_tokens=False)
        return list(encoding.ids), list(encoding.offsets)

    def decode(self, ids: Iterable[int]) -> str:
        known = [i for i in ids if 0 <= i < self.vocab_size and i != self.eod]
        return str(self.library.decode(known, skip_special_tokens=True))

    def stream(self) -> JsonStream:
        return JsonStream(self)


class JsonStream:
    """StreamDecoder of JsonTokenizer: a short window is decoded again, since spaces hang on the tokens before."""

    def __init__(self, tokenizer: JsonTokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        self._pending.append(token)
        fresh = self._fresh()
        if not fresh or fresh.endswith("\ufffd"):
            return ""
        self._context, self._pending = self._pending, []
        return fresh

    def finish(self) -> str:
        fresh = self._fresh() if self._pending else ""
        self._context, self._pending = [], []
        return fresh

    def _fresh(self) -> str:
        """Text of the pending ids in the place where they stand."""
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._pending)[len(before) :]


def load_tokenizer(name: str, eod: str | None = None) -> Tokenizer:
    """The tokenizer a configuration names: "bytes", a tokenizer.json, or a folder that holds one.

    Raises ValueError naming data.tokenizer when there is no such file or it has no end-of-document token.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name)
    if path.is_dir():
        path = path / "tokenizer.json"
    return JsonTokenizer(path, eod)


def with_vocabulary(run: Run) -> Run:
    """The run with model.vocab_size filled in from the tokenizer. Raises ValueError where they don't fit."""
    size = load_tokenizer(run.data.tokenizer).vocab_size
    given = run.model.vocab_size
    if given is not None and given < size:
        raise ValueError(
            f"model.vocab_size = {given}: data.tokenizer = {run.data.tokenizer!r} has {size} tokens; "
            f"set it to null or to at least {size}"
        )
    return replace(run, model=replace(run.model, vocab_size=given or size))


def train_bpe(texts: Iterator[str], vocab_size: int, path: str | Path, eod: str = "<|endoftext|>") -> JsonTokenizer:
    """Train a byte-level BPE on `texts` (pieces of any length) and save it at `path`.

    vocab_size  ids to make, the 256 bytes and the eod included; fewer come out when the text has too few pairs
    Raises ValueError when vocab_size is below 257.
    """
    if vocab_size < 257:
        raise ValueError(f"--train-bpe {vocab_size}: the 256 bytes and the end-of-document token need 257 ids at least")
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library: Any = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[eod],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    library.save(str(path))
    return JsonTokenizer(path, eod)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        way_out = 'give "bytes", a tokenizer.json, or a folder that holds one'
        raise ValueError(f'data.tokenizer = "{path}": cannot be read ({error}); {way_out}') from None


def _parse(text: str, path: str | Path) -> Any:
    from tokenizers import Tokenizer as Library

    try:
        return Library.from_str(text)
    except Exception as error:  # the library raises bare Exception for every malformed file
        reason = f"not a tokenizer.json of the tokenizers library ({error})"
        raise ValueError(
            f'data.tokenizer = "{path}": {reason}; save it with save_pretrained or Tokenizer.save'
        ) from None


def _find_eod(vocabulary: dict[str, int], path: Path, eod: str | None) -> int:
    """Id of the end-of-document token: the given one, else the folder's eos_token, else the first known name."""
    names = [eod] if eod is not None else [*_configured_eos(path), *EOD_NAMES]
    for name in names:
        if name in vocabulary:
            return vocabulary[name]
    tried = ", ".join(names[:4])
    way_out = "name one with --eod TOKEN, or put eos_token into a tokenizer_config.json beside it"
    raise ValueError(f'data.tokenizer = "{path}": has no end-of-document token (looked for {tried} ..); {way_out}')


def _configured_eos(path: Path) -> list[str]:
    """eos_token of the tokenizer_config.json beside a tokenizer.json, if there is one."""
    config = path.with_name("tokenizer_config.json")
    try:
        value = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return []
    value = value.get("content") if isinstance(value, dict) else value
    return [value] if isinstance(value, str) else []


def _digest(text: str, eod: int) -> str:
    """Hash of the parsed file, so that white space and key order do not count; truncation and padding do not either."""
    content = {key: value for key, value in json.loads(text).items() if key not in ("truncation", "padding")}
    canonical = json.dumps([content, eod], sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8")).hexdigest()
