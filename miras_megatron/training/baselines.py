"""What a byte of the held-out text costs: to the model, to byte frequencies, to gzip."""

from __future__ import annotations

import gzip
import math

import torch
from torch import Tensor, nn

from ..config.schema import Run
from .blend import split_documents
from .shipped import shipped_documents

LANES = 16
"""pieces of the text that are read beside each other"""


def held_out_text(run: Run, part: str) -> Tensor:
    """The bytes [tokens] int64 of the shipped documents that data.split gives to `part`, joined by blank lines.

    Raises ValueError where the run reads another text.
    """
    if run.data.train != "shipped" or run.data.tokenizer != "bytes":
        raise ValueError(
            f"data.train = {run.data.train!r}: the quickstart shows its figures on the shipped text, byte by byte; "
            f"set data.train to shipped and data.tokenizer to bytes, or train with miras-train"
        )
    documents = shipped_documents()
    first, last = split_documents(len(documents), run.data.split_shares, part)
    return torch.tensor(list("\n\n".join(documents[first:last]).encode("utf-8")))


@torch.inference_mode()
def stream_bits_per_byte(model: nn.Module, text: Tensor, cut: int = 512) -> float:
    """Mean bits a byte of `text` [tokens], read as LANES long streams whose state is never reset."""
    length = (len(text) - 1) // LANES
    tokens, labels = (text[start : start + LANES * length].reshape(LANES, length) for start in (0, 1))
    states, nats = None, 0.0
    for part, wanted in zip(tokens.split(cut, 1), labels.split(cut, 1), strict=True):
        losses, states = model(part, labels=wanted, states=states, return_states=True)
        nats += float(losses.double().sum())
    return nats / math.log(2) / tokens.numel()


def unigram_bits_per_byte(seen: Tensor, unseen: Tensor) -> float:
    """What `unseen` costs by the byte frequencies of `seen` (one added to each)."""
    counts = torch.bincount(seen, minlength=256).double() + 1.0
    return float(-(counts / counts.sum()).log2()[unseen].mean())


def gzip_bits_per_byte(text: Tensor) -> float:
    """What `text` costs when gzip -9 packs it by itself."""
    packed = gzip.compress(bytes(text.tolist()), 9)
    return 8.0 * len(packed) / len(text)
