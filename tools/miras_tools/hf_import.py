"""The weights of an exported folder as a checkpoint's tensors, one at a time; the reverse of `hf_weights`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from miras_megatron.config.schema import Run

from .hf_names import VOCABULARY, to_hf
from .hf_shapes import Shape, weight_dtypes, weight_shapes
from .hf_weights import PADDING, first_few
from .safetensors_stream import FLOAT_CODES, INDEX, SINGLE
from .tensor_progress import TensorProgress

FLOATS = frozenset(FLOAT_CODES.values())


class ImportedWeights:
    """The weights in `folder`, a model of `run`. Raises ValueError where a file or a tensor isn't as it must be.

    widened   names, in `folder`, of the tensors given out so far that training keeps wider than they were there
    """

    def __init__(self, folder: Path, run: Run) -> None:
        self.folder, self._wanted, self._dtypes = folder, weight_shapes(run), weight_dtypes(run)
        assert run.model.vocab_size is not None
        self._rows = run.model.vocab_size
        self._places, torn = find_tensors(folder)
        if torn:
            raise ValueError(first_few(torn))
        if problems := misfits(self._places, run):
            raise ValueError(f"{folder}: doesn't fit its config.json: {first_few(problems)}")
        if problems := padding_misfits(folder, run):
            raise ValueError(f"{problems[0]}; or remove the file, and the rows will be zero")
        self._padding = (folder / PADDING).is_file()
        self.widened: list[str] = []

    @property
    def has_padding(self) -> bool:
        """Whether the rows beyond the vocabulary, where there are any, are known."""
        tables = [shape for ours, shape in self._wanted.items() if to_hf(ours) in VOCABULARY]
        return self._padding or all(shape[0] == self._rows for shape in tables)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(the checkpoint's name, tensor), in the model's order. Raises ValueError for values that are not finite."""
        told = TensorProgress(
            "read", len(self._wanted), sum(path.stat().st_size for path in set(self._places.values()))
        )
        for ours, shape in self._wanted.items():
            theirs = to_hf(ours)
            tensor = _finite_tensor(self._places[theirs], theirs)
            told.add(tensor.nbytes)
            yield ours, self._as_trained(theirs, self._dtypes[ours], self._padded(theirs, tensor, shape))

    def _as_trained(self, name: str, wanted: torch.dtype, tensor: Tensor) -> Tensor:
        """The tensor, as wide as training has it: what was rounded elsewhere isn't rounded at every step here."""
        if tensor.dtype.itemsize >= wanted.itemsize:
            return tensor
        self.widened.append(name)
        return tensor.to(wanted)

    def _padded(self, name: str, tensor: Tensor, shape: Shape) -> Tensor:
        """A tensor of its own, with the rows beyond the vocabulary."""
        if name not in VOCABULARY:
            return tensor.clone()
        whole = torch.zeros(shape, dtype=tensor.dtype)
        whole[: self._rows] = tensor
        if self._padding and shape[0] > self._rows:
            whole[self._rows :] = _finite_tensor(self.folder / PADDING, name)
        return whole


def misfits(places: dict[str, Path], run: Run) -> list[str]:
    """What of the tensors in `places` isn't as a model of `run` has it, one line each."""
    wanted = exported_shapes(run)
    problems = [f"{name} is missing" for name in wanted if name not in places]
    problems += [f"{name} is no weight of this model" for name in places if name not in wanted]
    for path in sorted(set(places.values())):
        problems += _misshapen(path, wanted, places)
    return problems


def padding_misfits(folder: Path, run: Run) -> list[str]:
    """What of the padding beside an export isn't as a model of `run` has it; nothing where there is no such file."""
    path, rows = folder / PADDING, run.model.padded_vocab() - (run.model.vocab_size or 0)
    if not path.is_file():
        return []
    wanted = {name: (rows, *shape[1:]) for name, shape in exported_shapes(run).items() if name in VOCABULARY}
    try:
        found = dict.fromkeys(_names(path), path)
    except ValueError as error:
        return [str(error)]
    problems = [f"{name} is missing" for name in wanted if name not in found]
    return [f"{path}: doesn't fit config.json: {problem}" for problem in [*problems, *_misshapen(path, wanted, found)]]


def exported_shapes(run: Run) -> dict[str, Shape]:
    """Exported name -> shape there."""
    shapes, rows = {to_hf(ours): shape for ours, shape in weight_shapes(run).items()}, run.model.vocab_size or 0
    return {name: (rows, *shape[1:]) if name in VOCABULARY else shape for name, shape in shapes.items()}


def find_tensors(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Tensor name -> the file it is in; and which files are missing, torn, or lie about their tensors.

    Raises ValueError where there is neither a file of weights nor an index of several.
    """
    named = _named(folder)
    held, problems = dict[str, Path](), list[str]()
    for path in sorted(set(named.values())):
        try:
            held |= dict.fromkeys(_names(path), path)
        except ValueError as error:
            problems.append(str(error))
    if problems or set(named) == {SINGLE}:
        return held, problems
    wrong = sorted(name for name, path in named.items() if held.get(name) != path)
    problems = [f"{folder / INDEX}: {name} isn't in {named[name].name}; put back files of one export" for name in wrong]
    return held, problems


def _named(folder: Path) -> dict[str, Path]:
    """The index of the folder: tensor name -> file; where there is one file alone, itself under its own name."""
    if (folder / SINGLE).is_file():
        return {SINGLE: folder / SINGLE}
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        return {str(name): folder / Path(str(file)).name for name, file in index["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"FOLDER = {folder}: no {SINGLE}, and {INDEX} can't be read ({reason})") from None


def _names(path: Path) -> list[str]:
    if not path.is_file():
        raise ValueError(f"{path.parent / INDEX}: names {path.name}, which isn't there; copy the whole folder")
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


def _finite_tensor(path: Path, name: str) -> Tensor:
    tensor = read_tensor(path, name)
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"{path}: {name} holds values that are not finite; a model with them writes nothing but noise")
    return tensor


def _torn(path: Path, error: Exception) -> ValueError:
    if not os.access(path, os.R_OK):  # of which safetensors says that there is no such file
        return ValueError(f"{path}: can't be read (Permission denied); ask its owner for the right to")
    return ValueError(f"{path}: can't be read ({error}); it was cut off or changed: copy it again")
