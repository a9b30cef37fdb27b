"""What DeepSpeed's ZeRO leaves of a model on one rank: the flat parts of weights, gradients and moments.

Its optimizers keep them in lists under names of their own; here they are the same for all stages (`zero_stages`,
`zero_weights`), and a weight's part is found by the weight. Nothing of deepspeed is imported: `zero` makes the engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from .mesh import ParallelMesh
from .shares import Span


@dataclass(frozen=True)
class Part:
    """Where a weight's numbers lie on this rank.

    weight  the model's parameter
    shape   of the whole weight
    flat    number of the flat tensor that its part is in
    offset  of the part in it
    spans   which numbers of the weight, flat, each rank of the data x context group has
    """

    weight: nn.Parameter
    shape: torch.Size
    flat: int
    offset: int
    spans: list[Span]

    def of(self, flats: list[Tensor], rank: int) -> Tensor | None:
        """This rank's part in one of the flat tensors of each group; None where it has nothing of the weight."""
        start, end = self.spans[rank]
        return flats[self.flat].narrow(0, self.offset, end - start) if end > start else None


class Called(nn.Module):
    """What the schedule calls: the model, whose every backward pass is framed for DeepSpeed's hooks.

    DeepSpeed counts on one backward after each forward; here forwards may run ahead, so the frame hangs on the
    backward alone: it opens with the gradient of the output and closes when the whole pass is through.
    """

    def __init__(self, zero: ZeroModel, model: nn.Module):
        super().__init__()
        self.module, self.config = model, model.config
        self._frame = (zero.open_backward, zero.close_backward)

    def forward(self, *args: Any, **options: Any) -> Any:
        output = self.module(*args, **options)
        if torch.is_grad_enabled():
            output.register_hook(self._open)
        return output

    def _open(self, gradient: Tensor) -> None:
        begin, end = self._frame
        begin()
        torch.autograd.Variable._execution_engine.queue_callback(end)


class ZeroModel(ABC):
    """What is alike in all stages.

    engine   DeepSpeed's
    called   for the schedule
    parts    of every trained weight, in the order of the groups
    masters  flat float32 tensors, one a group, which AdamW updates
    counts   whether this rank's numbers count in sums over the data x context group
    group    among whose ranks each weight's numbers are shared out

    Gradients are summed over ranks after a backward pass, not in it as DeepSpeed's hooks would: which weights take part
    and in which order their gradients come hangs on a rank's documents and its place in a row, but the buckets in which
    they are summed must be alike. The price: until the pass ends, its gradients are whole, in the weights' dtype.
    """

    masters: list[Tensor]
    shards: list[Tensor] | None = None
    """stage 3: the weights themselves, flat as the masters are"""
    parts: list[Part]
    summed_over = 1.0
    """what DeepSpeed divided the summed gradients by"""

    def __init__(self, engine: Any, mesh: ParallelMesh):
        self.engine, self.group, self.rank = engine, mesh.groups.dp_cp, int(mesh.groups.dp_cp.rank())
        self.counts = True
        self.optimizer = engine.optimizer
        self.called = Called(self, engine.module)

    @property
    def adam(self) -> torch.optim.Optimizer:
        """The optimizer over the flat masters."""
        inner: torch.optim.Optimizer = self.optimizer.optimizer
        return inner

    @property
    def updated(self) -> list[Tensor]:
        """What AdamW updates, one for each of `masters`."""
        return self.masters

    def own(self, flats: list[Tensor]) -> Iterator[tuple[Part, Tensor]]:
        """(weight, this rank's part of it in `flats`) where it has one."""
        for part in self.parts:
            values = part.of(flats, self.rank)
            if values is not None:
                yield part, values

    def local_gradient(self, weight: Any) -> Tensor:
        """The whole gradient of a weight over this rank's own rows, before `finish`; stages 0 and 1."""
        fill_with_zeros(weight, self.optimizer.use_grad_accum_attribute)
        gradient: Tensor = weight.grad_accum if self.optimizer.use_grad_accum_attribute else weight.grad
        return gradient

    def open_backward(self) -> None:
        """Before the first gradient of a backward pass."""
        self.optimizer.clear_backward_seen_flag()
        self.optimizer.backward_prologue()

    @abstractmethod
    def close_backward(self) -> None:
        """After the last gradient of a backward pass."""

    @abstractmethod
    def forget(self) -> None:
        """Drop all gradients."""

    @abstractmethod
    def finish(self) -> None:
        """Sum what is not summed yet over the ranks, after the last backward pass of a step."""

    @property
    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """Flat float32 sums over the ranks, one a group, of this rank's numbers; after `finish`."""

    def give_away(self) -> None:  # noqa: B027  # only stage 3 shares weights
        """Leave no weight whole that is shared: those that a pass without an update has left so would be used again."""

    def update(self) -> None:
        """AdamW on this rank's numbers, and the new weights on all ranks."""
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.step()

    def close(self) -> None:
        """Take off DeepSpeed's hooks: they hang on the weights' autograd nodes, where no collector sees the circle."""
        self.engine.destroy()

    def save_own(self, folder: Path, tag: str, step: int) -> None:
        """Write DeepSpeed's own checkpoint `folder`/`tag`, with what its converter to universal ones asks for.

        A collective call. Its files are pickled.
        """
        asked = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.3}, "iteration": step}
        plain = self.engine.module_state_dict

        def tensors(*args: Any, **options: Any) -> dict[str, Any]:
            """Without megatron's empty extra states, at which the converter stops."""
            return {name: tensor for name, tensor in plain(*args, **options).items() if tensor is not None}

        with patch.object(self.engine, "module_state_dict", tensors):
            self.engine.save_checkpoint(str(folder), tag=tag, client_state=asked)

    @contextmanager
    def whole_shapes(self) -> Iterator[None]:
        """Inside, the model's parameters have the shapes of whole weights, to be asked where they belong."""
        yield

    def state(self, name: str) -> list[Tensor]:
        """One of AdamW's moments of every group, made where there was no update yet."""
        found, counts_in_tensors = [], isinstance(self.adam, torch.optim.AdamW)
        for updated in self.updated:
            entry = self.adam.state[updated]
            if name not in entry:
                entry[name] = torch.zeros_like(updated, requires_grad=False)
                entry.setdefault("step", torch.tensor(0.0) if counts_in_tensors else 0)
            found.append(entry[name].view(-1))
        return found


def fill_with_zeros(weight: Any, apart: bool) -> None:
    """Give a weight that took no part in a pass a gradient, as the other ranks have one.

    apart  DeepSpeed keeps the float32 sum in `grad_accum`
    """
    if apart and weight.grad_accum is None:
        weight.grad_accum = torch.zeros_like(weight, dtype=torch.float32)
    elif not apart and weight.grad is None:
        weight.grad = torch.zeros(getattr(weight, "ds_shape", weight.shape), dtype=weight.dtype, device=weight.device)
