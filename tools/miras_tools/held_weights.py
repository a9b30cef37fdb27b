"""The weights that a checkpoint or an exported folder holds, one at a time, under the checkpoint's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from miras_megatron.config.schema import Run
from miras_megatron.training.checkpoint import COMMON, saved_run
from miras_megatron.training.checkpoint_folder import find_checkpoint
from miras_megatron.training.checkpoint_manifest import damaged_files, read_manifest
from miras_megatron.training.plain_files import read_plain
from miras_megatron.training.stored_tensors import StoredTensors

from .hf_config import CONFIG, read_config, run_of_folder
from .hf_import import find_tensors, misfits, padding_misfits, read_tensor
from .hf_names import VOCABULARY, to_hf
from .hf_shapes import weight_shapes
from .hf_weights import PADDING
from .hf_weights import misfits as misfits_of_checkpoint


@dataclass(frozen=True)
class HeldWeights:
    """What lies in `folder`.

    kind      "checkpoint" or "export"
    run       the configuration it was written under
    facts     (name, text) lines about it
    names     of the weights, in order
    nbytes    of all of them
    read      name -> the whole tensor, on the CPU; ValueError where it can't be read
    settings  whether `run` has the training's settings; without training_config.yaml they are defaults
    problems  what is wrong with the files, and with tensors beside the configuration, one line each
    """

    kind: str
    folder: Path
    run: Run
    facts: list[tuple[str, str]]
    names: list[str]
    nbytes: int
    read: Callable[[str], Tensor]
    problems: list[str] = field(default_factory=list)
    settings: bool = True


def open_held(path: Path, verify: bool = True) -> HeldWeights:
    """A run folder (its latest checkpoint), a checkpoint or an exported folder. Raises ValueError for anything else.

    verify  whether a checkpoint's files are compared with their digests
    """
    return _export(path) if (path / CONFIG).is_file() else _checkpoint(find_checkpoint(path, "PATH"), verify)


def _checkpoint(folder: Path, verify: bool) -> HeldWeights:
    manifest, stored, run = read_manifest(folder), StoredTensors(folder), saved_run(folder)
    common = read_plain(folder / "common.pt", COMMON)
    damaged = damaged_files(folder) if verify else []
    problems = [*damaged, *misfits_of_checkpoint(stored, run)]
    size = sum(entry["bytes"] for entry in manifest["files"].values())
    writers = len({name.split("_")[2] for name in manifest["files"] if name.startswith("__")})
    state = "not verified" if not verify else "damaged" if damaged else "as it was written (SHA-256 of every file)"
    beside = len(stored.names) - len(stored.weights)
    facts = [
        (
            "what",
            f"checkpoint of format {manifest['format']}, step {common['step']:,}, {common['tokens']:,} tokens read",
        ),
        ("files", f"{len(manifest['files'])}, {size / 2**20:,.1f} MiB, {state}"),
        ("written by", f"{writers} rank(s): {_layout(run)}"),
        ("tensors", f"{len(stored.weights)} weights and {beside} of optimizer, random and carried states"),
    ]
    total = sum(stored.nbytes(name) for name in stored.weights)
    return HeldWeights("checkpoint", folder, run, facts, stored.weights, total, stored.read, problems)


def _layout(run: Run) -> str:
    parallel = run.parallel
    return f"{parallel.tensor} tensor x {parallel.pipeline} pipeline x {parallel.context} context, the rest data"


def _export(folder: Path) -> HeldWeights:
    config = read_config(folder)
    run, told = run_of_folder(folder, config)
    places, problems = find_tensors(folder)
    problems = problems or [*misfits(places, run), *padding_misfits(folder, run)]
    padding = [folder / PADDING] if (folder / PADDING).is_file() else []
    files = sorted(set(places.values()))
    size = sum(path.stat().st_size for path in [*files, *padding])
    facts = [
        (
            "what",
            f"export of format {config.get('miras_format')}, {'with' if padding else 'without'} "
            "the vocabulary's padding rows",
        ),
        ("files", f"{len(files)} of weights, {size / 2**20:,.1f} MiB"),
        (
            "training",
            "training_config.yaml is there"
            if told
            else "no training_config.yaml: defaults where config.json is silent",
        ),
    ]
    names = [name for name in weight_shapes(run) if to_hf(name) in places]
    read = partial(_read_exported, places, None if problems or not padding else padding[0])
    return HeldWeights("export", folder, run, facts, names, size, read, problems, told)


def _read_exported(places: dict[str, Path], padding: Path | None, name: str) -> Tensor:
    """The tensor with its padding rows, where they are known."""
    theirs = to_hf(name)
    tensor = read_tensor(places[theirs], theirs)
    if padding is None or theirs not in VOCABULARY:
        return tensor
    return torch.cat([tensor, read_tensor(padding, theirs)])
