"""A complete run of a second: a tiny model on a few made-up documents, for tests that call the commands in-process."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch.distributed as dist

from miras_megatron.training.main import main
from miras_megatron.training.token_writer import PairWriter

CONFIG = """\
run: {{dir: {run}}}
model: {{block: lmm, layers: 2, hidden: 16, heads: 2, ffn: 32, segment: 8, window: 8, persistent_tokens: 2}}
memory: {{rule: titans, chunk_size: 8, expansion: 2, horizon: 64}}
data: {{train: {data}, split: "75,25,0", sequence_length: 24, packing: reset, tokenizer: bytes, cache: {cache}}}
training: {{steps: 10, precision: fp32, micro_batch: 2, global_batch: 4, seed: 5}}
optimizer: {{lr: 1.0e-2, min_lr: 1.0e-3, warmup_steps: 2}}
checkpoint: {{every: 5, keep: 0}}
logging: {{tensorboard: false, memory_every: 4}}
evaluate: {{every: 0, batches: 1, position_buckets: 4}}
"""


def write_documents(prefix: Path, count: int = 24, seed: int = 0) -> str:
    """PREFIX.bin and .idx with `count` documents of 5 to 90 bytes of words, each ended by id 256."""
    draw = random.Random(seed)
    words = ["memory ", "token ", "a ", "is ", "surprise ", "the ", "keeps "]
    with PairWriter(prefix, np.dtype("<u2")) as pair:
        for _ in range(count):
            text = "".join(draw.choice(words) for _ in range(draw.randint(1, 15))).encode()[: draw.randint(4, 89)]
            pair.add([np.array([*text, 256], dtype=np.uint16)])
    return str(prefix)


def tiny_config(folder: Path, name: str = "run", **changes: Any) -> list[str]:
    """The command line of a tiny run in `folder`/`name`; changes as section__field=value."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "text"
    if not data.with_suffix(".bin").exists():
        write_documents(data)
    config = folder / f"{name}.yaml"
    # in one go: a rank of a test world writes it too, while another may be reading
    draft = folder / f"{name}.{os.getpid()}.draft"
    draft.write_text(CONFIG.format(run=folder / name, data=data, cache=folder / "cache"))
    draft.replace(config)
    return [str(config), *(f"--{field.replace('__', '.')}={value}" for field, value in changes.items())]


def train_here(argv: list[str]) -> int:
    """One rank's part of a run, as torchrun would start it, on a rank of a test world."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with mock.patch.dict(os.environ, torchrun):
        return main(argv)


def records(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The objects of a run's records."""
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def learned(run: Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of every step: what two runs that are the same share to the last bit."""
    return [(r["step"], r["loss"], r["grad_norm"]) for r in records(run)]
