"""Opens one Megatron .bin / .idx pair for training through megatron-core's IndexedDataset, once it is found whole.

megatron-core asserts or reads past the end where a file is short; here every such file is refused by name first.
"""

from __future__ import annotations

import logging
import struct
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset
from numpy.typing import NDArray

from ..config.token_pair import AGAIN, find_prefix
from .manifest import Manifest, manifest_path, read_manifest
from .token_writer import DTYPES, HEADER_BYTES, MAGIC

log = logging.getLogger(__name__)


class TokenFiles:
    """The documents of one pair.

    prefix    path without .bin / .idx
    lengths   int64 [documents], tokens of each
    manifest  None for a pair made elsewhere
    """

    def __init__(self, prefix: str, *, vocab_size: int, tokenizer_digest: str | None = None, field: str = "data.train"):
        """Open `prefix` (with or without its ending or "_text_document").

        vocab_size        ids must be below it (before padding)
        tokenizer_digest  refuse a manifest that names another; None: do not compare
        field             configuration field to name in errors
        Raises ValueError for files that are missing, cut short, of another tokenizer or with ids out of range.
        """
        self.prefix = find_prefix(prefix, field)
        self.field = field
        self.vocab_size = vocab_size
        self.manifest = read_manifest(self.prefix)
        _check_tokenizer(self.prefix, field, self.manifest, tokenizer_digest, vocab_size)
        self._tokens = _open_pair(self.prefix, field)
        self._bounds = _document_bounds(self._tokens)
        self.lengths = np.diff(self._bounds)
        self._masks = self._open_masks()

    @property
    def has_masks(self) -> bool:
        """Whether some tokens' predictions do not count."""
        return self._masks is not None

    def read(self, document: int, offset: int, count: int) -> NDArray[np.int64]:
        """`count` tokens of `document` from `offset` on; raises ValueError for an id outside the vocabulary."""
        tokens = self._read(self._tokens, document, offset, count).astype(np.int64)
        if count and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            self._refuse_ids(document, int(tokens.max() if tokens.max() >= self.vocab_size else tokens.min()))
        return tokens

    def read_mask(self, document: int, offset: int, count: int) -> NDArray[np.float32]:
        """The loss weights of the same tokens; all 1 for a set without prompts."""
        if self._masks is None:
            return np.ones(count, np.float32)
        return self._read(self._masks, document, offset, count).astype(np.float32)

    def _read(self, pair: IndexedDataset, document: int, offset: int, count: int) -> NDArray[np.integer]:
        assert 0 <= offset <= offset + count <= self.lengths[document], "read beyond the document"
        start = (int(self._bounds[document]) + offset) * np.dtype(pair.index.dtype).itemsize
        piece: NDArray[np.integer] = pair.bin_reader.read(dtype=pair.index.dtype, count=count, offset=start)
        return piece

    def _open_masks(self) -> IndexedDataset | None:
        prefix = self.prefix + ".loss_mask"
        promised = self.manifest is not None and self.manifest.loss_mask
        if not promised and not Path(prefix + ".idx").exists():
            return None
        masks = _open_pair(prefix, self.field)
        if not np.array_equal(_document_bounds(masks), self._bounds):
            reason = "its documents differ in length from those of the tokens"
            raise ValueError(f"{self.field} = {self.prefix!r}: {prefix}.idx: {reason}; {AGAIN}")
        return masks

    def _refuse_ids(self, document: int, token: int) -> None:
        reason = f"document {document} holds token id {token}, outside the vocabulary of {self.vocab_size}"
        way_out = "set data.tokenizer (or model.vocab_size) to what the files were made with"
        raise ValueError(f"{self.field} = {self.prefix!r}: {self.prefix}.bin: {reason}; {way_out}")


def _check_tokenizer(prefix: str, field: str, manifest: Manifest | None, digest: str | None, vocab_size: int) -> None:
    if manifest is None:
        unchecked = "tokenizer and checksums are not checked"
        log.warning("%s = %r: no %s; %s", field, prefix, manifest_path(prefix).name, unchecked)
        return
    if digest is not None and manifest.tokenizer_digest != digest:
        made = f"made with tokenizer {manifest.tokenizer!r} ({manifest.tokenizer_digest[:12]})"
        reason = f"{made}, but data.tokenizer hashes to {digest[:12]}"
        way_out = "set data.tokenizer to that one, or run miras-preprocess again with the new one"
        raise ValueError(f"{field} = {prefix!r}: {reason} (see {manifest_path(prefix)}); {way_out}")
    if manifest.largest_token >= vocab_size:
        reason = f"holds token id {manifest.largest_token}, outside the vocabulary of {vocab_size}"
        way_out = f"model.vocab_size must be {manifest.vocab_size} or more"
        raise ValueError(f"{field} = {prefix!r}: {prefix}.bin: {reason}; {way_out}")


def _open_pair(prefix: str, field: str) -> IndexedDataset:
    """megatron-core's reader of a pair whose sizes were checked; raises ValueError naming the file that is short."""
    for path, reason in (
        (prefix + ".idx", _index_fault(Path(prefix + ".idx"))),
        (prefix + ".bin", "empty" if not Path(prefix + ".bin").stat().st_size else None),
    ):
        if reason is not None:
            raise ValueError(f"{field} = {prefix!r}: {path} is {reason}; {AGAIN}")
    pair = _read_index(prefix, field)
    lengths, offsets = pair.index.sequence_lengths, pair.index.sequence_pointers
    itemsize = np.dtype(pair.index.dtype).itemsize
    ends = np.cumsum(lengths, dtype=np.int64) * itemsize
    have, need = Path(prefix + ".bin").stat().st_size, int(ends[-1])
    if have != need:
        reason = f"{'truncated' if have < need else 'longer than its index'}: {have:,} bytes, the index says {need:,}"
        raise ValueError(f"{field} = {prefix!r}: {prefix}.bin is {reason}; {AGAIN}")
    if not np.array_equal(offsets[1:], ends[:-1]):
        raise ValueError(f"{field} = {prefix!r}: {prefix}.idx is damaged: offsets do not follow the lengths; {AGAIN}")
    return pair


def _read_index(prefix: str, field: str) -> IndexedDataset:
    """megatron-core's reader, its assertions turned into a message about the file."""
    try:
        pair = IndexedDataset(prefix)
        documents, lengths = pair.index.document_indices, pair.index.sequence_lengths
        assert documents[0] == 0 and bool((np.diff(documents) >= 0).all()) and bool((lengths >= 0).all())
    except AssertionError:
        raise ValueError(f"{field} = {prefix!r}: {prefix}.idx is damaged: impossible documents; {AGAIN}") from None
    return pair


def _index_fault(path: Path) -> str | None:
    """What is wrong with an .idx file, or None: magic, version, dtype, and its size against its own counts."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        header = file.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return f"truncated: {size} bytes, its header alone has {HEADER_BYTES}"
    if header[:9] != MAGIC:
        return "not a Megatron index (wrong first bytes)"
    version, code, sequences, documents = struct.unpack("<QBQQ", header[9:])
    if version != 1 or code not in DTYPES:
        return f"of version {version} with dtype code {code}; version 1 and integer tokens are read here"
    if sequences == 0 or documents < 2:
        return "an index of no documents"
    need = HEADER_BYTES + 12 * sequences + 8 * documents
    if size not in (need, need + sequences):
        return f"{'truncated' if size < need else 'longer than its counts'}: {size:,} bytes, its counts say {need:,}"
    return None


def _document_bounds(pair: IndexedDataset) -> NDArray[np.int64]:
    """First token of every document and the total, int64 [documents + 1]; a document may be several sequences."""
    ends: NDArray[np.int64] = np.concatenate([[0], np.cumsum(pair.index.sequence_lengths, dtype=np.int64)])
    bounds: NDArray[np.int64] = ends[np.asarray(pair.index.document_indices)]
    return bounds
