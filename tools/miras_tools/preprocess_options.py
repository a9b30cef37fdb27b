"""The command line of miras-preprocess, and the plan that tells one run from another."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from miras_megatron.training.tokenizer import load_tokenizer

from .text_sources import KINDS, SEPARATORS, Keys

EXAMPLES = """
examples:
  miras-preprocess --input book.txt --output-prefix data/book
  miras-preprocess --input 'crawl/*.jsonl.zst' --train-bpe 8192 --output-prefix data/crawl --workers 8
  miras-preprocess --input fineweb/ --text-key text --tokenizer gpt2/tokenizer.json --output-prefix data/fineweb
  miras-preprocess --input chats.jsonl --dry-run
"""


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    input: list[str]
    output_prefix: str
    tokenizer: str
    eod: str | None
    train_bpe: int
    train_bpe_bytes: int
    append_eod: bool
    keys: Keys
    workers: int
    log_interval: float
    unit_bytes: int
    dry_run: bool
    overwrite: bool
    verify: str | None


def parse(argv: list[str] | None) -> Options:
    """Read the command line; a wrong one ends the process with code 2 and one line."""
    parser = _parser()
    given = parser.parse_args(argv)
    if not given.verify and not given.input:
        parser.error("--input is required: files, folders or quoted globs")
    if not given.verify and not given.dry_run and not given.output_prefix:
        parser.error("--output-prefix is required (or --dry-run to only count)")
    if given.output_prefix.endswith(os.sep):
        parser.error(f"--output-prefix {given.output_prefix}: a folder; add a name, such as {given.output_prefix}book")
    if given.train_bpe and given.tokenizer != "bytes":
        parser.error("--train-bpe and --tokenizer: give one of the two")
    if given.train_bpe and given.train_bpe < 257:
        parser.error(f"--train-bpe {given.train_bpe}: 257 or more, for the 256 bytes and the end of a document")
    for name in ("workers", "unit_bytes", "train_bpe_bytes"):
        if getattr(given, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(given, name)}: 1 or more")
    names = ("text_key", "prompt_key", "completion_key", "txt_documents")
    values = {key: value for key, value in vars(given).items() if key not in names}
    keys = Keys(given.text_key, given.prompt_key, given.completion_key, given.txt_documents)
    return Options(keys=keys, **values)


def plan_of(options: Options, paths: Sequence[str]) -> dict[str, Any]:
    """Everything that decides the bytes of a run, as plain JSON; raises ValueError for an unreadable tokenizer."""
    trained = bool(options.train_bpe)
    return {
        "sources": [[path, os.path.getsize(path), os.stat(path).st_mtime_ns] for path in paths],
        "tokenizer": None if trained else load_tokenizer(options.tokenizer, options.eod).digest,
        "train_bpe": [options.train_bpe, options.train_bpe_bytes, options.eod] if trained else None,
        "append_eod": options.append_eod,
        "unit_bytes": options.unit_bytes,
        "keys": asdict(options.keys),
    }


def plan_digest(plan: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode("utf-8")).hexdigest()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="miras-preprocess",
        description="Text files to Megatron's PREFIX_text_document.bin and .idx, with a manifest. Kinds: "
        f"{' '.join(KINDS)}; text and jsonl also .gz and .zst. A killed run is finished by the same command.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--input", nargs="+", default=[], metavar="PATH", help="files, folders (all files inside) and quoted globs")
    add("--output-prefix", default="", metavar="PREFIX", help="PREFIX_text_document.bin and .idx are written")
    add("--tokenizer", default="bytes", metavar="PATH", help='"bytes", a tokenizer.json or its folder (default: bytes)')
    add("--eod", metavar="TOKEN", help="token that ends a document (default: what the tokenizer says)")
    add("--train-bpe", type=int, default=0, metavar="N", help="train a byte-level BPE of N ids on the input first")
    add("--train-bpe-bytes", type=int, default=200_000_000, metavar="N", help="text to train it on (default: 200 MB)")
    add("--append-eod", action=argparse.BooleanOptionalAction, default=True, help="end every document with the eod id")
    add("--text-key", "--json-key", default="text", metavar="NAME", help="field or column of the text (default: text)")
    add("--prompt-key", default="prompt", metavar="NAME", help="field that is read but not trained on, where a record")
    add("--completion-key", default="completion", metavar="NAME", help=".. has no text but a prompt and a completion")
    add(
        "--txt-documents", choices=list(SEPARATORS), default="file", help="what a document of a .txt is (default: file)"
    )
    add("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default: all cores)")
    add("--log-interval", type=float, default=10.0, metavar="S", help="seconds between progress lines off a terminal")
    add(
        "--unit-bytes",
        type=int,
        default=32 << 20,
        metavar="N",
        help="input read and restarted at a time (default: 32 MiB)",
    )
    add("--dry-run", action="store_true", help="count documents, tokens and lengths; write nothing")
    add("--overwrite", action="store_true", help="replace files that are there")
    add("--verify", metavar="PREFIX", help="only compare a written set with the checksums of its manifest")
    return parser
