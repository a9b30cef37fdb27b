"""Where the two files of a token set lie, found without reading them: also on a login node without torch."""

from __future__ import annotations

from pathlib import Path

AGAIN = "run miras-preprocess again with --overwrite, or correct the path"
"""The way out of a pair that isn't whole."""


def find_prefix(prefix: str, field: str = "data.train") -> str:
    """The path without ending of the pair that a user named; raises ValueError when one of its files is missing."""
    bare = prefix.removesuffix(".bin").removesuffix(".idx")
    for candidate in (bare, bare + "_text_document"):
        found = [ending for ending in (".bin", ".idx") if Path(candidate + ending).is_file()]
        if len(found) == 2:
            return candidate
        if found:
            missing = candidate + (".idx" if found == [".bin"] else ".bin")
            raise ValueError(f"{field} = {prefix!r}: {missing} is missing ({candidate}{found[0]} is there); {AGAIN}")
    way_out = "make them with miras-preprocess --output-prefix, or correct the path"
    raise ValueError(f"{field} = {prefix!r}: there is no {bare}.idx and no {bare}_text_document.idx; {way_out}")
