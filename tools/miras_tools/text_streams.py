"""Bytes of plain, .gz and .zst files as pieces, lines and text, a MiB at a time."""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections.abc import Iterator

PIECE_BYTES = 1 << 20


def byte_pieces(path: str) -> Iterator[bytes]:
    """Decompressed bytes of a file; raises ValueError naming it where it is damaged or cut short."""
    kind = path.lower().rpartition(".")[2]
    try:
        yield from {"zst": _zst_pieces, "gz": _gz_pieces}.get(kind, _plain_pieces)(path)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read ({error}); is it damaged or cut short?") from None


def lines_of(path: str, first: int, last: int) -> Iterator[tuple[int, bytes]]:
    """(byte offset, line) of the lines that *start* in bytes [first, last) of a file; last = -1: all lines.

    Neighbouring ranges share no line and miss none, wherever they are cut.
    """
    if last == -1:
        yield from _split_lines(byte_pieces(path))
        return
    with open(path, "rb") as file:
        if first > 0:
            file.seek(first - 1)
            file.readline()
        while (offset := file.tell()) < last and (line := file.readline()):
            yield offset, line


def decoded(pieces: Iterator[bytes], path: str) -> Iterator[str]:
    """UTF-8 text of byte pieces, a byte-order mark dropped; raises ValueError naming the byte that is no UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    done = 0
    try:
        for piece in pieces:
            if text := decoder.decode(piece):
                yield text
            done += len(piece)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        place = f"near byte {max(0, done - 4) + error.start}"
        raise ValueError(f"{path}: not UTF-8 {place} ({error.reason}); convert the file, or see iconv") from None


def split_text(pieces: Iterator[str], separator: str) -> Iterator[str]:
    """Texts between separators, empty ones left out; one text at a time is in memory."""
    rest = ""
    for piece in pieces:
        *whole, rest = (rest + piece.replace("\r\n", "\n")).split(separator)
        yield from (text for text in map(_trim, whole) if text)
    if rest := _trim(rest):
        yield rest


def _trim(text: str) -> str:
    return text.strip("\r\n")


def _split_lines(pieces: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
    offset, parts = 0, []
    for piece in pieces:
        *whole, rest = piece.split(b"\n")
        for line in whole:
            parts.append(line)
            joined = b"".join(parts)
            yield offset, joined
            offset, parts = offset + len(joined) + 1, []
        parts.append(rest)
    if joined := b"".join(parts):
        yield offset, joined


def _plain_pieces(path: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def _gz_pieces(path: str) -> Iterator[bytes]:
    with gzip.open(path, "rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def _zst_pieces(path: str) -> Iterator[bytes]:
    """Frames of a .zst file, one after the other; unlike the library's reader this notices a cut-off end."""
    import zstandard

    with open(path, "rb") as file:
        frame = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
        begun = False
        try:
            while packed := file.read(PIECE_BYTES // 16):
                while packed:
                    begun = True
                    if piece := frame.decompress(packed):
                        yield piece
                    packed = frame.unused_data if frame.eof else b""
                    if frame.eof:
                        frame, begun = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj(), False
        except zstandard.ZstdError as error:
            raise OSError(f"damaged zstd data: {error}") from None
        if begun:
            raise EOFError("the file ends inside a zstd frame")
