"""DeepSpeed's universal checkpoint: a folder for each weight, with files for it and AdamW's moments.

    FOLDER/zero/NAME/fp32.pt  exp_avg.pt  exp_avg_sq.pt  step.pt     whole tensors, float32: {"param": tensor, ..}
    FOLDER/zero/optimizer_state.pt                                   what is alike for all weights
    FOLDER/miras/common.pt  config.yaml                              what the project's checkpoint has beside tensors

All of it is read as tensors and plain values; files of others that hold pickled objects only where that is asked for.
"""

from __future__ import annotations

import os
import reprlib
import shutil
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from miras_megatron.config.schema import Run
from miras_megatron.parallel.zero import VERSION
from miras_megatron.training.optimizer import MOMENTS
from miras_megatron.training.plain_files import no_extra_globals, write_plain
from miras_megatron.training.stored_tensors import StoredTensors

from .ds_common import MOST, is_count
from .hf_shapes import weight_dtypes, weight_shapes

BESIDE = "miras"
"""Folder of what isn't DeepSpeed's."""

MOST_GROUPS = 64
"""of parameters, of whoever reads a universal checkpoint"""

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Types of the numbers that are read."""

TRUST = "it is unpickled, which runs what is in it, only with --trust-pickle"


def write_universal(checkpoint: Path, updates: int, target: Path) -> None:
    """Write the tensors of a checkpoint of the project as a universal one, one tensor at a time."""
    stored = StoredTensors(checkpoint)
    names = set(stored.names)
    for name in stored.weights:
        folder = target / "zero" / name
        folder.mkdir(parents=True)
        master = f"optimizer.master.{name}"
        write_plain(folder / "fp32.pt", {"param": stored.read(master if master in names else name).float()})
        for moment in MOMENTS:
            write_plain(folder / f"{moment}.pt", {"param": stored.read(f"optimizer.{moment}.{name}")})
        torch.save(updates, folder / "step.pt")
    # DeepSpeed walks its groups beside these, copies what they say (nothing: rates are the run's), stops at the last.
    groups: list[dict[str, Any]] = [{"params": []} for _ in range(MOST_GROUPS)]
    write_plain(target / "zero" / "optimizer_state.pt", {"ds_version": VERSION, "param_groups": groups})
    keep_beside(checkpoint, target)


def keep_beside(checkpoint: Path, target: Path) -> None:
    """Copy what a checkpoint of the project has beside tensors."""
    (target / BESIDE).mkdir(parents=True, exist_ok=True)
    for name in ("common.pt", "config.yaml"):
        shutil.copyfile(checkpoint / name, target / BESIDE / name)


class UniversalTensors:
    """The tensors of a universal checkpoint as those of a checkpoint of the project, one at a time.

    trusted  files that hold more than tensors and plain values are unpickled
    Raises ValueError naming the file that is missing, damaged, of another shape, not to be trusted, or whose numbers
    no run goes on with.
    """

    def __init__(self, folder: Path, run: Run, trusted: bool = False) -> None:
        self.folder, self.trusted = folder / "zero", trusted
        self.shapes, self.dtypes = weight_shapes(run), weight_dtypes(run)
        missing = [
            path
            for name in self.shapes
            for kind in ("fp32", *MOMENTS)
            if not (path := self.folder / name / f"{kind}.pt").is_file()
        ]
        if missing:
            raise ValueError(f"{missing[0]} is missing, and {len(missing) - 1} more; is it a checkpoint of this model?")

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(the project's name, tensor): of each weight itself, its moments and, where it is bf16, its master."""
        for name, dtype in self.dtypes.items():
            whole = self._read(name, "fp32")
            yield name, whole.to(dtype, copy=True)
            for moment in MOMENTS:
                yield f"optimizer.{moment}.{name}", self._read(name, moment)
            if dtype != torch.float32:
                yield f"optimizer.master.{name}", whole

    @property
    def updates(self) -> int | None:
        """Updates that AdamW had made; None where the checkpoint doesn't say."""
        path = self.folder / next(iter(self.shapes)) / "step.pt"
        return _count(path, self._load(path)) if os.path.lexists(path) else None

    def _read(self, name: str, kind: str) -> Tensor:
        path, shape = self.folder / name / f"{kind}.pt", torch.Size(self.shapes[name])
        content = self._load(path)
        tensor = content.get("param") if isinstance(content, dict) else content
        # DeepSpeed's converter leaves what stage 3 had as one row of numbers
        if not _is_dense(tensor) or tensor.shape not in (shape, torch.Size([shape.numel()])):
            raise ValueError(
                f"{path}: holds {_in_words(tensor)}, must hold a dense floating point tensor of shape {list(shape)}; "
                "is it a checkpoint of this model?"
            )
        numbers = tensor.detach().reshape(shape).to(torch.float32, copy=True)
        if (fault := _fault(numbers, kind)) is not None:
            raise ValueError(
                f"{path}: {kind} of {name} holds {fault}; no run goes on with that, take an older checkpoint"
            )
        return numbers

    def _load(self, path: Path) -> Any:
        if not path.is_file():
            raise ValueError(f"{path}: is no file; write the checkpoint again")
        with no_extra_globals():
            try:
                return torch.load(path, map_location="cpu", weights_only=not self.trusted)
            except Exception as error:  # over a file of another kind torch's reader stumbles by whatever error comes
                first = (str(error).strip().splitlines() or [type(error).__name__])[0]
                told = "" if self.trusted else f"; if it holds pickled objects, {TRUST}"
                raise ValueError(f"{path}: can't be read as tensors and plain values: {first}{told}") from None


def _is_dense(value: object) -> TypeGuard[Tensor]:
    """Whether it is a tensor whose numbers all lie in memory, in a type that weights are trained in."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.device.type != "cpu":
        return False
    return not value.is_nested and value.dtype in FLOATS


def _fault(numbers: Tensor, kind: str) -> str | None:
    """What AdamW can't go on with: a number that is none, or a mean of squares below 0."""
    if not numbers.numel():
        return None
    low, high = (float(bound) for bound in numbers.aminmax())  # both are NaN where one number is
    if not isfinite(low) or not isfinite(high):
        return f"{low if not isfinite(low) else high}, no finite number"
    return f"{low:g}, below 0, where means of squares lie" if kind == MOMENTS[1] and low < 0 else None


def _in_words(value: object) -> str:
    if not isinstance(value, Tensor):
        return reprlib.repr(value)
    layout, device = str(value.layout).removeprefix("torch."), value.device.type
    return f"a {layout} tensor of {str(value.dtype).removeprefix('torch.')} on {device}, shape {list(value.shape)}"


def _count(path: Path, value: object) -> int:
    """What a step.pt holds, as a whole number; DeepSpeed's may be a tensor of one. Raises ValueError."""
    told = _in_words(value)
    if isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu" and not value.dim():
        value = value.item()
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    if not isinstance(whole, int) or not is_count(whole):
        raise ValueError(
            f"{path}: holds {told}, must hold a whole number of updates from 0 to {MOST}; "
            "mend it, or remove it: then common.pt says how many there were"
        )
    return whole
