"""Finds the files a user names and reads documents out of them in bounded memory.

.txt .text .md       a document a file, or a line, or cut at blank lines or form feeds
.jsonl .ndjson       an object a line: {"text": ..} or {"prompt": .., "completion": ..}
.parquet .arrow      a row a document, the same names as columns (.arrow: a folder saved by Hugging Face datasets)
The first two kinds may end in .gz or .zst. What is wrong with a file becomes one ValueError that names file and place.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .text_streams import byte_pieces, decoded, lines_of, split_text

KINDS = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
SEPARATORS = {"file": None, "line": "\n", "blank-line": "\n\n", "form-feed": "\f"}


@dataclass(frozen=True)
class Keys:
    """Names of fields or columns, and how text files are cut into documents (a key of SEPARATORS)."""

    text: str = "text"
    prompt: str = "prompt"
    completion: str = "completion"
    txt_documents: str = "file"


@dataclass(frozen=True)
class Slice:
    """Part of a file: bytes [first, last) of plain jsonl, row groups of parquet, else all of it (0, -1)."""

    path: str
    first: int = 0
    last: int = -1


@dataclass(frozen=True)
class Document:
    """Text in pieces, read once; `prompt` is what comes before it and is not trained on."""

    pieces: Iterator[str]
    prompt: str | None = None


def find_files(inputs: Sequence[str]) -> list[str]:
    """Files that the inputs (files, folders, globs) mean, each once, folders and globs in the order of names.

    Raises ValueError naming an input that matches nothing or a file of a kind that is not read.
    """
    found: list[str] = []
    for entry in inputs:
        if os.path.isdir(entry):
            inside = (str(path) for path in sorted(Path(entry).rglob("*")) if path.is_file())
            matches = [path for path in inside if kind_of(path) and not _is_hidden(path, entry)]
        elif os.path.exists(entry):
            matches = [entry]
        else:
            matches = sorted(path for path in glob.glob(entry, recursive=True) if os.path.isfile(path))
        if not matches:
            what = "holds no readable kind of file" if os.path.isdir(entry) else "matches no file"
            raise ValueError(f"--input {entry}: {what} ({', '.join(KINDS)}; text also .gz, .zst); correct the path")
        found += matches
    for path in found:
        if kind_of(path) is None:
            raise ValueError(f"--input {path}: unknown ending; rename it to one of {', '.join(KINDS)}")
    return list(dict.fromkeys(found))


def kind_of(path: str) -> str | None:
    """A value of KINDS, or None for a file that is not read."""
    name = path.lower()
    packed = name.endswith((".gz", ".zst"))
    kind = KINDS.get(Path(name.removesuffix(".gz").removesuffix(".zst")).suffix)
    return None if packed and kind in ("parquet", "arrow") else kind


def plan_units(paths: Sequence[str], unit_bytes: int) -> list[tuple[Slice, ...]]:
    """Cut the files into units of about `unit_bytes` that are read, restarted and stored each for itself, in order.

    A compressed or plain text file is never cut; many small ones share a unit.
    """
    units: list[tuple[Slice, ...]] = []
    waiting: list[Slice] = []
    size = 0
    for path in paths:
        for part, part_bytes in _slices(path, unit_bytes):
            waiting.append(part)
            size += part_bytes
            if size >= unit_bytes:
                units.append(tuple(waiting))
                waiting, size = [], 0
    return [*units, tuple(waiting)] if waiting else units


def read_documents(part: Slice, keys: Keys) -> Iterator[Document]:
    """Documents of a slice, in order; raises ValueError naming file and place of what cannot be read."""
    kind = kind_of(part.path)
    try:
        if kind == "text":
            yield from _text_documents(part.path, keys)
        elif kind == "jsonl":
            yield from _json_documents(part, keys)
        else:
            from .table_sources import table_rows

            for row in table_rows(part, keys, kind or ""):
                yield _document(row, keys)
    except _Unfit as fault:
        raise ValueError(f"{part.path}: {fault}") from None
    except OSError as error:
        raise ValueError(f"{part.path}: cannot be read ({error}); is it damaged or cut short?") from None


def _is_hidden(path: str, folder: str) -> bool:
    return any(name.startswith(".") for name in Path(path).relative_to(folder).parts)


def _slices(path: str, unit_bytes: int) -> Iterator[tuple[Slice, int]]:
    try:
        size = os.path.getsize(path)
        open(path, "rb").close()
    except OSError as error:
        raise ValueError(f"--input {path}: cannot be read ({error.strerror}); correct the path or its rights") from None
    if kind_of(path) == "parquet":
        from .table_sources import row_group_slices

        yield from row_group_slices(path, unit_bytes)
    elif kind_of(path) == "jsonl" and not path.lower().endswith((".gz", ".zst")) and size > unit_bytes:
        for first in range(0, size, unit_bytes):
            yield Slice(path, first, min(size, first + unit_bytes)), min(size, first + unit_bytes) - first
    else:
        yield Slice(path), size


def _text_documents(path: str, keys: Keys) -> Iterator[Document]:
    pieces = decoded(byte_pieces(path), path)
    separator = SEPARATORS[keys.txt_documents]
    if separator is None:
        yield Document(pieces)
        return
    for text in split_text(pieces, separator):
        yield Document(_slices_of(text))


def _json_documents(part: Slice, keys: Keys) -> Iterator[Document]:
    for offset, line in lines_of(part.path, part.first, part.last):
        if not line.strip():
            continue
        try:
            yield _document(_parse(line), keys)
        except _Unfit as fault:
            raise ValueError(f"{_place(part, offset)}: {fault}") from None


class _Unfit(ValueError):
    """A record that is no document; the caller knows where it stands."""


def _parse(line: bytes) -> dict[str, object]:
    import json

    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise _Unfit(f"not UTF-8 ({error.reason}); convert the file first") from None
    except ValueError as error:
        raise _Unfit(f"not JSON ({error}); correct or drop that line") from None
    except RecursionError:
        raise _Unfit("nested too deep to be read; correct or drop that line") from None
    if not isinstance(record, dict):
        raise _Unfit(f"{type(record).__name__}, not an object; one object a line is read")
    return record


def _document(record: dict[str, object], keys: Keys) -> Document:
    """The document of a record with a text, or a prompt and a completion."""
    names = [keys.text] if keys.text in record else [keys.prompt, keys.completion]
    if missing := [name for name in names if name not in record]:
        there = ", ".join(sorted(record)[:12]) or "nothing"
        wanted = f"no {keys.text!r}" if len(missing) == 2 else f"no {missing[0]!r}"
        raise _Unfit(f"has {wanted} but {there}; name the field with --text-key")
    texts = [record[name] if record[name] is not None else "" for name in names]
    for name, text in zip(names, texts, strict=True):
        if not isinstance(text, str):
            raise _Unfit(f"{name!r} is {type(text).__name__}, not text; name another field with --text-key")
    return Document(_slices_of(str(texts[-1])), str(texts[0]) if len(texts) == 2 else None)


def _slices_of(text: str, size: int = 1 << 16) -> Iterator[str]:
    """A text in pieces, so that what is made of a piece is small."""
    return (text[start : start + size] for start in range(0, len(text), size))


def _place(part: Slice, offset: int) -> str:
    """File and line number of a byte offset, counted only when something is wrong."""
    if part.first == 0 and part.last == -1:
        number = sum(1 for start, _ in lines_of(part.path, 0, -1) if start < offset)
    else:
        with open(part.path, "rb") as file:
            number, left = 0, offset
            while left > 0 and (piece := file.read(min(left, 1 << 20))):
                number, left = number + piece.count(b"\n"), left - len(piece)
    return f"{part.path}, line {number + 1}"
