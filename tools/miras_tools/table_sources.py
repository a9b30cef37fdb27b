"""Rows of parquet files and of the .arrow files that Hugging Face `datasets` saves; the only toucher of pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.parquet

if TYPE_CHECKING:
    from .text_sources import Keys, Slice

ROWS = 32
"""rows decoded at a time"""


def row_group_slices(path: str, unit_bytes: int) -> Iterator[tuple[Slice, int]]:
    """Runs of row groups of about `unit_bytes` each, with their size; raises ValueError when it is no parquet."""
    from .text_sources import Slice

    with _opened(path) as table:
        sizes = [table.metadata.row_group(number).total_byte_size for number in range(table.num_row_groups)]
    first, size = 0, 0
    for number, group_bytes in enumerate(sizes):
        size += group_bytes
        if size >= unit_bytes or number == len(sizes) - 1:
            yield Slice(path, first, number + 1), size
            first, size = number + 1, 0


def table_rows(part: Slice, keys: Keys, kind: str) -> Iterator[dict[str, object]]:
    """Rows of a slice as dicts of the wanted columns; raises ValueError when none of them is there."""
    batches = _parquet_batches(part, keys) if kind == "parquet" else _arrow_batches(part, keys)
    try:
        for batch in batches:
            for start in range(0, batch.num_rows, ROWS):
                yield from batch.slice(start, ROWS).to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(f"{part.path}: damaged {kind} file ({_first_line(error)}); write it again") from None


def _parquet_batches(part: Slice, keys: Keys) -> Iterator[Any]:
    with _opened(part.path) as table:
        columns = _columns(table.schema_arrow.names, keys, part.path)
        yield from table.iter_batches(ROWS, row_groups=list(range(part.first, part.last)), columns=columns)


def _arrow_batches(part: Slice, keys: Keys) -> Iterator[Any]:
    with pyarrow.memory_map(part.path) as file, pyarrow.ipc.open_stream(file) as reader:
        columns = _columns(reader.schema.names, keys, part.path)
        for batch in reader:
            yield batch.select(columns)


def _columns(names: list[str], keys: Keys, path: str) -> list[str]:
    wanted = [keys.text] if keys.text in names else [keys.prompt, keys.completion]
    if not set(wanted) <= set(names):
        raise ValueError(f"{path}: no column {keys.text!r} but {', '.join(names[:12])}; name one with --text-key")
    return wanted


def _opened(path: str) -> Any:
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a whole parquet file ({_first_line(error)}); write it again") from None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
