"""Token files for the data tests: tokens tell which document and which place they come from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from miras_megatron.training.token_files import TokenFiles
from miras_megatron.training.token_writer import PairWriter

STRIDE = 1000
RAGGED = [1, 15, 16, 17, 51, 3, 18, 1, 17, 11]


def write_set(folder: Path, lengths: list[int], name: str = "set", masks: list[np.ndarray] | None = None) -> TokenFiles:
    """Documents of the given lengths; token = STRIDE * document + place."""
    prefix = str(folder / name)
    with PairWriter(prefix, np.dtype("<i4")) as writer:
        for document, length in enumerate(lengths):
            writer.add([STRIDE * document + np.arange(length)])
    if masks is not None:
        with PairWriter(prefix + ".loss_mask", np.dtype(np.uint8)) as writer:
            for mask in masks:
                writer.add([mask])
    return TokenFiles(prefix, vocab_size=STRIDE * len(lengths))


def same(one: object, other: object) -> bool:
    """Bit-equality of two batches."""
    for name in ("tokens", "labels", "loss_mask", "reset", "lanes", "samples"):
        if not torch.equal(getattr(one, name), getattr(other, name)):
            return False
    cuts, others = one.cu_seqlens, other.cu_seqlens  # type: ignore[attr-defined]
    if cuts is None or others is None:
        return cuts is others
    return all(torch.equal(a, b) for a, b in zip(cuts, others, strict=True))
