"""Stages 0 to 2 of DeepSpeed's ZeRO: where each keeps what it shares, and how its sums over ranks are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .mesh import ParallelMesh
from .zero_parts import Part, ZeroModel, fill_with_zeros


class Alone:
    """A group of this rank alone."""

    def rank(self) -> int:
        """Of this rank."""
        return 0

    def size(self) -> int:
        """Of the group."""
        return 1


class WholeStates(ZeroModel):
    """Stage 0: every rank has all. Gradients of bf16 weights are summed in float32, as in the other stages.

    pairs  (weight, its float32 master, or the weight itself)
    """

    def __init__(self, engine: Any, mesh: ParallelMesh, pairs: list[tuple[nn.Parameter, nn.Parameter]]):
        super().__init__(engine, mesh)
        self._ranks, self.counts = mesh.groups.dp_cp, self.rank == 0
        self.group, self.rank = Alone(), 0
        self.pairs, self._sums = pairs, dict[int, Tensor]()
        self.parts = [Part(w, w.shape, i, 0, [(0, w.numel())]) for i, (w, _) in enumerate(pairs)]
        low = [weight for weight, master in pairs if master is not weight]
        self._hooks = [weight.register_post_accumulate_grad_hook(self._take) for weight in low]

    @property
    def adam(self) -> torch.optim.Optimizer:
        inner: torch.optim.Optimizer = self.optimizer
        return inner

    @property
    def updated(self) -> list[Tensor]:
        return [master for _, master in self.pairs]

    @property
    def masters(self) -> list[Tensor]:  # type: ignore[override]
        return [master.data.view(-1) for _, master in self.pairs]

    def _take(self, weight: Tensor) -> None:
        if weight.grad is not None:
            known = self._sums.get(id(weight))
            self._sums[id(weight)] = weight.grad.float() if known is None else known.add_(weight.grad)
            weight.grad = None

    def local_gradient(self, weight: Any) -> Tensor:
        if weight.dtype == torch.float32:
            fill_with_zeros(weight, False)
            return weight.grad  # type: ignore[no-any-return]
        return self._sums.setdefault(id(weight), torch.zeros_like(weight, dtype=torch.float32))

    def open_backward(self) -> None:
        pass

    def close_backward(self) -> None:
        pass

    def forget(self) -> None:
        self.engine.set_gradient_accumulation_boundary(False)
        self._sums.clear()
        for weight, master in self.pairs:
            weight.grad = master.grad = None

    def finish(self) -> None:
        for weight, master in self.pairs:
            master.grad = self.local_gradient(weight)
        self._sums.clear()
        self.engine.allreduce_no_retain([master.grad for _, master in self.pairs], self._ranks)

    def close(self) -> None:
        super().close()
        for hook in self._hooks:
            hook.remove()

    @property
    def gradients(self) -> list[Tensor]:
        return [master.grad.view(-1) for _, master in self.pairs if master.grad is not None]

    @torch.no_grad()
    def update(self) -> None:
        super().update()
        for weight, master in self.pairs:
            if master is not weight:
                weight.copy_(master)


class StateShards(ZeroModel):
    """Stages 1 and 2: weights are whole on every rank; a group's are laid end to end and cut into equal parts."""

    def __init__(self, engine: Any, mesh: ParallelMesh):
        super().__init__(engine, mesh)
        self.masters = list(self.optimizer.single_partition_of_fp32_groups)
        self.optimizer._coalesce_grad_reduction = self.optimizer.partition_gradients
        self.parts = list(self._lay_out())

    def _lay_out(self) -> Iterator[Part]:
        ranks = int(self.group.size())
        for number, weights in enumerate(self.optimizer.bit16_groups):
            length, start = int(self.optimizer.partition_size[number]), 0
            for weight in weights:
                end = start + weight.numel()
                cuts = [
                    (min(max(rank * length, start), end), min(max((rank + 1) * length, start), end))
                    for rank in range(ranks)
                ]
                offset = max(start - self.rank * length, 0)
                spans = [(first - start, behind - start) for first, behind in cuts]
                yield Part(weight, weight.shape, number, min(offset, length), spans)
                start = end

    def close_backward(self) -> None:
        if self.optimizer.partition_gradients:
            self._sum_in_order()
            self.optimizer.overlapping_partition_gradients_reduce_epilogue()

    def _sum_in_order(self) -> None:
        """Let DeepSpeed sum all gradients over ranks, those it lacks here as zeros."""
        self.optimizer._coalesce_grad_reduction = False
        self.optimizer.setup_buckets()
        for number, weights in enumerate(self.optimizer.bit16_groups):
            for weight in weights:
                fill_with_zeros(weight, self.optimizer.use_grad_accum_attribute)
                self.optimizer.reduce_ready_partitions_and_remove_grads(weight, number)
        self.optimizer._coalesce_grad_reduction = self.optimizer.partition_gradients

    def forget(self) -> None:
        self.engine.set_gradient_accumulation_boundary(False)
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.micro_step_id = -1
        for number in range(len(self.masters)):
            self.optimizer.averaged_gradients[number] = self.optimizer.all_grad_tensors[number] = None
        if self.optimizer.cpu_offload:
            self.optimizer.reset_cpu_buffers()

    def finish(self) -> None:
        self.engine.set_gradient_accumulation_boundary(True)
        if self.optimizer.partition_gradients:
            self.optimizer.finalize_gradient_accumulation_boundary()
        else:
            self._sum_in_order()
            self.optimizer.overlapping_partition_gradients_reduce_epilogue()
        if not self.optimizer.cpu_offload:
            for number, length in enumerate(self.optimizer.partition_size):
                self.optimizer.averaged_gradients[number] = [self._flat(number, int(length))]

    def _flat(self, number: int, length: int) -> Tensor:
        """A group's gradients in one tensor; DeepSpeed hands on a list of pieces, filled up with zeros."""
        pieces = self.optimizer.averaged_gradients[number]
        flat: Tensor | None = getattr(pieces, "flat_partition", None)
        if flat is None:
            flat = torch.cat([piece.detach().reshape(-1).float() for piece in pieces])
        assert flat.numel() == length, f"{flat.numel()} gradients of {length}"
        return flat

    @property
    def gradients(self) -> list[Tensor]:
        if self.optimizer.cpu_offload:
            return [grad for master in self.masters if (grad := master.grad) is not None]
        return [self.optimizer.averaged_gradients[number][0] for number in range(len(self.masters))]
