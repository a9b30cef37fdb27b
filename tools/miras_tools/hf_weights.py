"""The weights of a checkpoint as an exported folder's safetensors, tensor by tensor; the reverse is `hf_import`.

Padding rows of the vocabulary have a file of their own, which transformers doesn't read. They are no tokens, but
count in training's softmax: a run that starts from an import has the original's loss only with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from miras_megatron.config.schema import Run
from miras_megatron.training.stored_tensors import StoredTensors

from .hf_names import VOCABULARY, to_hf, to_ours
from .hf_shapes import weight_shapes
from .safetensors_stream import FLOAT_CODES, Entry, write_file, write_shards
from .tensor_progress import TensorProgress

PADDING = "padding.safetensors"


class ExportedWeights:
    """What of the checkpoint in `stored`, a run's, is written. Raises ValueError where the two don't fit."""

    def __init__(self, stored: StoredTensors, run: Run) -> None:
        refuse_other_shapes(stored, run)
        assert run.model.vocab_size is not None
        self._stored, self._rows = stored, run.model.vocab_size
        # in the model's order, not in that of the layout that wrote them: equal weights make equal files
        self.entries = [self._entry(name) for name in weight_shapes(run)]
        self.padding = [self._rest(entry) for entry in self.entries if entry.name in VOCABULARY]

    @property
    def nbytes(self) -> int:
        """Bytes of all that is written."""
        return sum(entry.nbytes for entry in [*self.entries, *self.padding])

    def write(self, folder: Path, max_bytes: int) -> list[str]:
        """Write shards of at most `max_bytes`, their index, and the padding; the names of the shards."""
        told = TensorProgress("wrote", len(self.entries), sum(entry.nbytes for entry in self.entries))
        kept: dict[str, Tensor] = {}

        def tensor_of(name: str) -> Tensor:
            tensor = self._stored.read(to_ours(name))
            if name in VOCABULARY:
                kept[name] = tensor[self._rows :].clone()
                tensor = tensor[: self._rows]
            told.add(tensor.nbytes)
            return tensor

        names = write_shards(folder, self.entries, tensor_of, max_bytes)
        if any(entry.nbytes for entry in self.padding):
            write_file(folder / PADDING, self.padding, kept.__getitem__)
        return names

    def _entry(self, name: str) -> Entry:
        theirs, shape = to_hf(name), self._stored.shape(name)
        return Entry(theirs, self._stored.dtype(name), (self._rows, *shape[1:]) if theirs in VOCABULARY else shape)

    def _rest(self, entry: Entry) -> Entry:
        rows = self._stored.shape(to_ours(entry.name))[0] - self._rows
        return Entry(entry.name, entry.dtype, (rows, *entry.shape[1:]))


def refuse_other_shapes(stored: StoredTensors, run: Run) -> None:
    """Raise ValueError where the checkpoint doesn't hold just the weights that its configuration describes."""
    problems = misfits(stored, run)
    if problems:
        raise ValueError(f"{stored.folder}: doesn't fit its config.yaml: {first_few(problems)}")


def misfits(stored: StoredTensors, run: Run) -> list[str]:
    """What of the checkpoint's weights doesn't fit its configuration, one line each."""
    wanted, found = weight_shapes(run), {name: stored.shape(name) for name in stored.weights}
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{name} is no weight of this model" for name in found if name not in wanted]
    problems += [
        f"{name} is {list(found[name])}, config.yaml makes it {list(wanted[name])}"
        for name in wanted.keys() & found.keys()
        if wanted[name] != found[name]
    ]
    problems += [f"{name} is of {stored.dtype(name)}" for name in found if stored.dtype(name) not in FLOAT_CODES]
    return sorted(problems)


def first_few(lines: Sequence[str], most: int = 3) -> str:
    """The first lines in one, and how many more there are."""
    return "; ".join(lines[:most]) + (f" and {len(lines) - most} more" if len(lines) > most else "")
