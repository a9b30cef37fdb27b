"""Small runs and inputs for tests of whole models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from miras_megatron.config.schema import Data, Memory, Model, Parallel, Run, RunFolder, Training

VOCAB = 96


def small_run(pattern: str = "mcgwa", **changes: Any) -> Run:
    """A model of a layer a letter, hidden 32, 2 heads; sizes are ragged against chunk (4), segment (6) and window (5).

    changes   fields of Model, Memory, Parallel or Training by their names: layers=3, rule="yaad", tensor=2, ...
    """
    run = Run(
        run=RunFolder(),
        model=Model(
            **{"pattern": pattern, "layers": len(pattern), "hidden": 32, "heads": 2, "ffn": 48, "vocab_size": VOCAB},
            **{"pad_vocab_to": 32, "persistent_tokens": 3, "window": 5, "segment": 6, "init_std": 0.1},
        ),
        memory=Memory(chunk_size=4, checkpoint_every=2, lr_max=0.1),
        parallel=Parallel(),
        data=Data(sequence_length=32),
        training=Training(seed=3),
    )
    sections = {name: getattr(run, name) for name in ("model", "memory", "parallel", "training")}
    for field, value in changes.items():
        name = next(name for name, section in sections.items() if hasattr(section, field))
        sections[name] = replace(sections[name], **{field: value})
    return replace(run, **sections)


def random_tokens(rows: int, tokens: int, seed: int = 0) -> Tensor:
    """[rows, tokens] int64."""
    return torch.randint(0, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))
