"""Stage 3 of DeepSpeed's ZeRO: weights come when their layer works, and go when it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .mesh import ParallelMesh
from .zero_parts import Part, ZeroModel, fill_with_zeros


class WeightShards(ZeroModel):
    """Stage 3: every weight is cut into one equal part a rank, and whole only while its layer works.

    Of a bf16 run flats are kept for each group in its own dtype (`_in_their_dtypes`).

    layers  of the model, each of which has its weights for itself
    undo    what was changed in DeepSpeed for this model
    """

    def __init__(self, engine: Any, mesh: ParallelMesh, layers: Iterable[nn.Module], undo: Callable[[], object]):
        super().__init__(engine, mesh)
        self._undo = undo
        self._release = self.optimizer.parameter_offload.post_sub_module_backward_function
        self._hooks = [layer.register_forward_pre_hook(self._mark, with_kwargs=True) for layer in layers]
        self.masters = list(self.optimizer.fp32_partitioned_groups_flat)
        self.shards = list(self.optimizer.fp16_partitioned_groups_flat)
        self.summed_over = float(self.group.size())
        self.optimizer._coalesce_grad_reduction = True
        for hook in self.optimizer._leaf_module_hooks:
            hook.remove()  # it would fill up gradients that only come later in the pass
        # Its own norm, which nobody asks for, is summed over pipeline stages group by group; they have other groups.
        self.optimizer._get_norm_groups = lambda: [torch.zeros(())]
        self.parts = list(self._lay_out())

    def _lay_out(self) -> Iterator[Part]:
        for number, weights in enumerate(self.optimizer.fp16_groups):
            offset = 0
            for weight in weights:
                length, whole = int(weight.partition_numel()), int(weight.ds_numel)
                cuts = range(0, (int(self.group.size()) + 1) * length, length)
                spans = [(min(a, whole), min(b, whole)) for a, b in zip(cuts, cuts[1:], strict=False)]
                yield Part(weight, torch.Size(weight.ds_shape), number, offset, spans)
                offset += length

    def close_backward(self) -> None:
        self._sum_in_order()
        self.optimizer.overlapping_partition_gradients_reduce_epilogue()
        self.optimizer.backward_epilogue()

    def _sum_in_order(self) -> None:
        self.optimizer._coalesce_grad_reduction = False
        with self.whole_shapes():  # a gradient must have its weight's
            for part in self.parts:
                fill_with_zeros(part.weight, False)
        for weights in self.optimizer.fp16_groups:
            for weight in weights:
                self.optimizer.reduce_ready_partitions_and_remove_grads(weight)
        self.optimizer._coalesce_grad_reduction = True

    def forget(self) -> None:
        self.engine.set_gradient_accumulation_boundary(False)
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.grad_partitions_flat_buffer.zero_()

    def finish(self) -> None:
        self.engine.set_gradient_accumulation_boundary(True)
        self.optimizer.finalize_gradient_accumulation_boundary()
        if not self.optimizer.offload_optimizer:
            flats = self.optimizer.grad_partitions_flat_buffer.split([len(master) for master in self.masters])
            self.optimizer.averaged_gradients = {number: [flat] for number, flat in enumerate(flats)}

    @property
    def gradients(self) -> list[Tensor]:
        if self.optimizer.offload_optimizer:
            return [grad for master in self.masters if (grad := master.grad) is not None]
        return [self.optimizer.averaged_gradients[number][0] for number in range(len(self.masters))]

    def give_away(self) -> None:
        self.optimizer._partition_all_parameters()

    @contextmanager
    def whole_shapes(self) -> Iterator[None]:
        plain = [(part.weight, part.weight.data) for part in self.parts]
        for part in self.parts:
            part.weight.data = part.weight.data.new_empty(1).expand(part.shape)
        try:
            yield
        finally:
            for weight, data in plain:
                weight.data = data

    def _mark(self, layer: nn.Module, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Let a layer's weights go each time a backward of it is through, which is when all its inputs have gradients.

        DeepSpeed looks at positional inputs, and megatron-core names a layer's; and it counts for the last forward
        alone, where others may wait for their backward. Else all weights would be whole at the end of a pass.
        """
        watched = [name for name, x in options.items() if isinstance(x, Tensor) and x.requires_grad]
        left = len(watched)

        def done() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._release(layer)

        mark: Any = _Mark.apply
        return args, options | {name: mark(options[name], done) for name in watched}

    def close(self) -> None:
        super().close()
        for hook in self._hooks:
            hook.remove()
        self._undo()


class _Mark(torch.autograd.Function):
    """Nothing is done to a layer's input; when its gradient is there, `then` is called."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, then: Callable[[], None]) -> Tensor:
        ctx.then = then
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.then()
        return gradient, None
