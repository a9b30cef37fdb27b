"""The weights of an exported folder as a checkpoint's tensors, one at a time; the reverse of `hf_weights`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from miras_megatron.config.schema import Run

from .hf_names import VOCABULARY, to_hf
from .hf_shapes import Shape, weight_shapes
from .hf_weights import PADDING
from .safetensors_stream import DTYPES, INDEX, SINGLE
from .tensor_progress import TensorProgress

FLOATS = frozenset(DTYPES.values())


class ImportedWeights:
    """The weights in `folder`, a model of `run`. Raises ValueError where a file or a tensor isn't as it must be."""

    def __init__(self, folder: Path, run: Run) -> None:
        self.folder, self._wanted = folder, weight_shapes(run)
        assert run.model.vocab_size is not None
        self._rows = run.model.vocab_size
        self._places = tensor_places(folder)
        self._refuse_other_tensors()
        self._padding = self._find_padding()

    @property
    def has_padding(self) -> bool:
        """Whether the rows beyond the vocabulary, where there are any, are known."""
        return self._padding or all(shape[0] == self._rows for shape in self._tables())

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(the checkpoint's name, tensor), in the model's order."""
        told = TensorProgress(
            "read", len(self._wanted), sum(path.stat().st_size for path in set(self._places.values()))
        )
        for ours, shape in self._wanted.items():
            theirs = to_hf(ours)
            tensor = read_tensor(self._places[theirs], theirs)
            told.add(tensor.nbytes)
            yield ours, (self._padded(theirs, tensor, shape) if theirs in VOCABULARY else tensor.clone())

    def _padded(self, name: str, tensor: Tensor, shape: Shape) -> Tensor:
        whole = torch.zeros(shape, dtype=tensor.dtype)
        whole[: self._rows] = tensor
        if self._padding and shape[0] > self._rows:
            whole[self._rows :] = read_tensor(self.folder / PADDING, name)
        return whole

    def _tables(self) -> list[Shape]:
        return [shape for ours, shape in self._wanted.items() if to_hf(ours) in VOCABULARY]

    def _exported(self) -> dict[str, Shape]:
        """Exported name -> shape there."""
        shapes = {to_hf(ours): shape for ours, shape in self._wanted.items()}
        return {name: (self._rows, *shape[1:]) if name in VOCABULARY else shape for name, shape in shapes.items()}

    def _refuse_other_tensors(self) -> None:
        wanted = self._exported()
        problems = [f"{name} is missing" for name in wanted if name not in self._places]
        problems += [f"{name} is no weight of this model" for name in self._places if name not in wanted]
        for path in sorted(set(self._places.values())):
            problems += list(_misshapen(path, wanted, self._places))
        if problems:
            more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
            raise ValueError(f"{self.folder}: doesn't fit its config.json: {'; '.join(problems[:3])}{more}")

    def _find_padding(self) -> bool:
        """Whether the padding is there. Raises ValueError where it is another model's."""
        path = self.folder / PADDING
        if not path.is_file():
            return False
        wanted = {to_hf(ours): (shape[0] - self._rows, *shape[1:]) for ours, shape in self._wanted.items()}
        wanted = {name: shape for name, shape in wanted.items() if name in VOCABULARY}
        found = dict.fromkeys(_names(path), path)
        problems = [f"{name} is missing" for name in wanted if name not in found]
        problems += list(_misshapen(path, wanted, found))
        if problems:
            raise ValueError(
                f"{path}: doesn't fit config.json: {problems[0]}; remove the file, and the rows will be zero"
            )
        return True


def tensor_places(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file it is in. Raises ValueError where a file is missing, torn, or lies about its tensors."""
    if (folder / SINGLE).is_file():
        return dict.fromkeys(_names(folder / SINGLE), folder / SINGLE)
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        named = {str(name): folder / Path(str(file)).name for name, file in index["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"FOLDER = {folder}: no {SINGLE}, and {INDEX} can't be read ({reason})") from None
    files = sorted(set(named.values()))
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ValueError(f"{folder / INDEX}: names {', '.join(missing)}, which isn't there; copy the whole folder")
    held = {name: path for path in files for name in _names(path)}
    wrong = sorted(name for name, path in named.items() if held.get(name) != path)
    if wrong:
        raise ValueError(f"{folder / INDEX}: {wrong[0]} isn't in {named[wrong[0]].name}; put back files of one export")
    return held


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise _torn(path, error) from None


def _misshapen(path: Path, wanted: dict[str, Shape], places: dict[str, Path]) -> Iterator[str]:
    """What is wrong with the shapes and dtypes in a file, one line each."""
    with safe_open(path, framework="pt") as file:
        for name in [name for name, place in places.items() if place == path and name in wanted]:
            part = file.get_slice(name)
            if tuple(part.get_shape()) != wanted[name]:
                yield f"{name} is {part.get_shape()}, must be {list(wanted[name])}"
            if part.get_dtype() not in FLOATS:
                yield f"{name} is of {part.get_dtype()}, must be one of {', '.join(sorted(FLOATS))}"


def read_tensor(path: Path, name: str) -> Tensor:
    """One tensor; the file is opened for it alone, so that no more of it stays in memory."""
    try:
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor
    except (SafetensorError, OSError) as error:
        raise _torn(path, error) from None


def _torn(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path}: can't be read ({error}); it was cut off or changed: copy it again")
