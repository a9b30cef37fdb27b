"""The public-domain English that ships with the package (miras_megatron/text), as token files for a first run."""

from __future__ import annotations

import fcntl
import gzip
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

import numpy as np

from .manifest import Manifest, describe_file, manifest_path, read_manifest, write_manifest
from .token_writer import PairWriter, token_dtype
from .tokenizer import ByteTokenizer, Tokenizer

TEXT = "austen.txt.gz"
BREAK = "\f"
"""stands between two documents (chapters) of the shipped text"""


def shipped_documents() -> list[str]:
    """The chapters of the shipped novels, in order."""
    packed = resources.files("miras_megatron").joinpath("text", TEXT).read_bytes()
    return gzip.decompress(packed).decode("utf-8").split(BREAK)


def prepare_shipped_text(
    folder: str | Path, tokenizer: Tokenizer | None = None, *, timeout: float = 120.0, field: str = "data.cache"
) -> str:
    """Token files of the shipped text in `folder`, made when absent; returns their prefix.

    Any number of processes, on any number of machines with or without a shared folder, may call this at once: the first
    to lock the folder writes, the others wait for it.

    tokenizer  bytes when None
    timeout    seconds to wait for another process
    field      the field that decides about the folder, for messages
    Raises TimeoutError naming the process that holds the lock, ValueError when the folder cannot be written.
    """
    tokenizer = tokenizer or ByteTokenizer()
    prefix = str(Path(folder) / f"shipped_{tokenizer.digest[:12]}_text_document")
    if manifest_path(prefix).exists():
        return prefix
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with _locked(Path(prefix + ".lock"), timeout):
            if read_manifest(prefix) is None:
                _write_documents(prefix, shipped_documents(), tokenizer)
    except OSError as error:
        if isinstance(error, TimeoutError):
            raise
        reason = error.strerror or error
        raise ValueError(f"{field}: {str(folder)!r} can't be written ({reason}); name another folder") from None
    return prefix


def _write_documents(prefix: str, documents: list[str], tokenizer: Tokenizer) -> None:
    """The pair under a scratch name, renamed when whole; the manifest last."""
    dtype = token_dtype(tokenizer.vocab_size)
    scratch = f"{prefix}.{os.getpid()}.tmp"
    largest = 0
    with PairWriter(scratch, dtype) as writer:
        for text in documents:
            ids = np.array([*tokenizer.encode(text), tokenizer.eod])
            largest = max(largest, int(ids.max()))
            writer.add([ids])
    for ending in (".bin", ".idx"):
        os.replace(scratch + ending, prefix + ending)
    write_manifest(
        prefix,
        Manifest(
            tokenizer=tokenizer.name,
            tokenizer_digest=tokenizer.digest,
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            appends_eod=True,
            dtype=dtype.name,
            documents=len(documents),
            tokens=sum(writer.lengths),
            text_bytes=sum(len(text.encode("utf-8")) for text in documents),
            largest_token=largest,
            files={ending: describe_file(prefix + ending) for ending in (".bin", ".idx")},
            plan="shipped",
        ),
    )


@contextmanager
def _locked(path: Path, timeout: float) -> Iterator[None]:
    """Hold an advisory lock, which the system drops when its holder dies; the file says who holds it."""
    with open(path, "a+", encoding="utf-8") as file:
        give_up = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    file.seek(0)
                    raise TimeoutError(_waited(path, file.read().strip(), timeout)) from None
                time.sleep(0.05)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def _waited(path: Path, holder: str, timeout: float) -> str:
    reason = f"waited {timeout:g} s for {holder or 'another process'}, which holds {path}"
    return f"data.cache: {reason}; end that process, or name another folder in data.cache"
