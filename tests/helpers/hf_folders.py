"""Exported folders of models with random weights, written without a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from miras_tools.hf_code import write_code
from miras_tools.hf_config import write_config
from miras_tools.hf_names import VOCABULARY, to_hf
from miras_tools.hf_tokenizer import write_tokenizer
from safetensors.torch import save_file

from miras_megatron.config.schema import Run
from miras_megatron.model.build import build_model
from miras_megatron.parallel.mesh import ParallelMesh
from miras_megatron.training.tokenizer import load_tokenizer

VOCAB, LENGTHS = 257, (3, 9, 70)


def exported_model(folder: Path, run: Run, mesh: ParallelMesh) -> Any:
    """Write a model for bytes with no zeros or ones among its weights, and its logits; returns the training model.

    expected.safetensors: tokens.T [2, T] and the training model's logits.T [2, T, VOCAB] float32 for LENGTHS.
    """
    folder.mkdir()
    run, tokenizer = replace(run, data=replace(run.data, tokenizer="bytes")), load_tokenizer("bytes")
    model, draw = build_model(run, mesh).eval(), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 or parameter.shape[0] == run.model.heads:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
    weights = {to_hf(name): p.detach().clone() for name, p in model.named_parameters()}
    weights |= {name: weights[name][:VOCAB].contiguous() for name in VOCABULARY if name in weights}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_config(folder, run, tokenizer)
    write_tokenizer(folder, tokenizer)
    write_code(folder)
    tokens = {n: torch.randint(256, (2, n), generator=draw) for n in LENGTHS}
    with torch.inference_mode():
        expected = {f"logits.{n}": model(x)[..., :VOCAB].float().contiguous() for n, x in tokens.items()}
    save_file(expected | {f"tokens.{n}": x for n, x in tokens.items()}, folder / "expected.safetensors")
    return model
