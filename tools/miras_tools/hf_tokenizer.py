"""The tokenizer of an exported folder: tokenizer.json and tokenizer_config.json for PreTrainedTokenizerFast; and back.

Bytes are a BPE of 256 symbols without merges, so that ids are byte values there too.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from miras_megatron.training.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, load_tokenizer

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
END = "<|endoftext|>"
"""What the byte tokenizer's id 256 is called outside."""


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Write `tokenizer` to `folder`; a tokenizer.json goes as it is, so that its digest stays."""
    if isinstance(tokenizer, JsonTokenizer):
        source = Path(tokenizer.name)
        shutil.copyfile(source, folder / FILE)
        end = str(tokenizer.library.id_to_token(tokenizer.eod))
    else:
        (folder / FILE).write_text(json.dumps(byte_file(), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        end = END
    (folder / CONFIG).write_text(json.dumps(_config(end), ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def read_tokenizer(folder: Path, given: str | None, config: dict[str, Any]) -> Tokenizer:
    """The tokenizer of an exported folder, or the `given` one. Raises ValueError where it isn't of the model's size."""
    path = folder / FILE
    if given is None and not path.is_file():
        raise ValueError(
            f"FOLDER = {folder}: has no {FILE}; put the model's there, or name it with --tokenizer "
            '("bytes" for one token a byte)'
        )
    tokenizer = load_tokenizer(given) if given is not None else _load(path)
    sizes = [config["vocab_size"], config.get("tokenizer_size", config["vocab_size"])]
    if tokenizer.vocab_size not in sizes:
        raise ValueError(
            f"{given or path}: a tokenizer of {tokenizer.vocab_size} tokens, the model is of "
            f"{' or '.join(dict.fromkeys(map(str, sizes)))}; name the model's own with --tokenizer"
        )
    return tokenizer


def adds_tokens(tokenizer: Tokenizer) -> bool:
    """Whether transformers' default call would put special tokens around a text, which training never saw."""
    if not isinstance(tokenizer, JsonTokenizer):
        return False
    return bool(tokenizer.library.num_special_tokens_to_add(False))


def byte_file() -> dict[str, Any]:
    """tokenizer.json of the byte tokenizer."""
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": ByteTokenizer.eod, "content": END, **special}],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {symbol: byte for byte, symbol in enumerate(byte_symbols())},
            "merges": [],
        },
    }


def byte_symbols() -> list[str]:
    """The character by which ByteLevel stands for each byte: itself where it is printable Latin-1."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _load(path: Path) -> Tokenizer:
    """The file at `path`, or our own byte tokenizer where it says the same."""
    return ByteTokenizer() if _is_bytes(path) else JsonTokenizer(path)


def _is_bytes(path: Path) -> bool:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        model, added = content["model"], content["added_tokens"]
        ids = {token["content"]: token["id"] for token in added}
        return bool(model["vocab"] == byte_file()["model"]["vocab"] and not model["merges"] and ids == {END: 256})
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _config(end: str) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "pad_token": end,
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
