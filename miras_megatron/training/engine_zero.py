"""The engine of DeepSpeed's ZeRO: gradients as sums over tokens, divided, measured and clipped as megatron-core does.

DeepSpeed leaves on each rank the flat parts of summed gradients that it updates with. Here they become what core's
`finalize_model_grads` makes: those of sequence-parallel weights added over tensor-parallel ranks, those of a tied
embedding over its two stages, all divided once by the tokens of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor, nn

from ..config.schema import Run
from ..model.initialise import decays
from ..model.language_model import MemoryLanguageModel
from ..parallel.mesh import ParallelMesh
from ..parallel.zero import Adam, Plan, start_zero
from .zero_state import ZeroState


class ZeroEngine:
    """See `engine.Engine`."""

    def __init__(self, run: Run, model: MemoryLanguageModel, mesh: ParallelMesh):
        optimizer = run.optimizer
        self._run, self._bare, self._mesh = run, model, mesh
        adam = Adam(optimizer.lr, optimizer.beta1, optimizer.beta2, optimizer.eps, optimizer.weight_decay)
        self.zero = start_zero(model, parameter_groups(model), adam, mesh, self._plan())
        self._state = ZeroState(self.zero, model, mesh)
        self.model: nn.Module = self.zero.called
        config: Any = model.config
        config.no_sync_func, config.grad_scale_func = None, None
        config.finalize_model_grads_func = self._finish

    def _plan(self) -> Plan:
        optimizer, layers = self._run.optimizer, tuple(self._bare.decoder.layers)
        return Plan(optimizer.zero_stage, optimizer.offload, layers)

    def begin_step(self, lr: float) -> None:
        for group in self.zero.adam.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self._run.optimizer.weight_decay * group["wd_mult"]
        self.zero.forget()

    def _finish(self, models: list[nn.Module], tokens: Tensor, **groups_of_core: Any) -> None:
        """After the last backward pass: what core's finalize_model_grads does, on the parts."""
        groups = self._mesh.groups
        self._add_over_tied_stages()
        self.zero.finish()
        if self._mesh.tensor > 1 and self._bare.config.sequence_parallel:
            self._add_over_tensor_ranks()
        last = dist.get_process_group_ranks(groups.pp)[-1]
        dist.broadcast(tokens, src=last, group=groups.pp)
        dist.all_reduce(tokens, group=groups.dp_cp)
        if tokens > 0:
            self._scale(self.zero.summed_over / float(tokens))

    def _add_over_tensor_ranks(self) -> None:
        """Norms and biases of sequence-parallel regions saw a part of the tokens each."""
        parts = [
            part
            for weight, part in self.zero.own(self.zero.gradients)
            if getattr(weight.weight, "sequence_parallel", False)
        ]
        if parts:
            flat = torch.cat(parts).to(self._mesh.device)
            dist.all_reduce(flat, group=self._mesh.groups.tp)
            for part, summed in zip(parts, flat.split([len(part) for part in parts]), strict=True):
                part.copy_(summed)

    def _add_over_tied_stages(self) -> None:
        """First and last stage have a copy each of a tied embedding; both get the sum, so that they stay alike."""
        ends = self._mesh.is_first_stage or self._mesh.is_last_stage
        if self._mesh.pipeline > 1 and ends and self._run.model.tie_embeddings:
            weight = self._bare.shared_embedding_or_output_weight()
            dist.all_reduce(self.zero.local_gradient(weight), group=self._mesh.groups.embd)

    def _scale(self, factor: float) -> None:
        for flat in self.zero.gradients:
            flat.mul_(factor)

    def gradient_norm(self) -> float:
        """As in core, a weight that ranks hold alike counts on the first of them."""
        square = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        for part, gradient in self.zero.own(self.zero.gradients):
            alone = param_is_not_tensor_parallel_duplicate(part.weight, self._mesh.groups.tp)
            if self.zero.counts and alone and param_is_not_shared(part.weight):
                square += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
        dist.all_reduce(square, group=self._mesh.groups.dp_cp)
        dist.all_reduce(square, group=self._mesh.groups.mp)
        return float(square.sqrt())

    def update(self, norm: float) -> None:
        clip = self._run.optimizer.clip
        if clip > 0 and clip / (norm + 1e-6) < 1:
            self._scale(clip / (norm + 1e-6))
        self.zero.update()

    def own_gradients(self) -> Iterator[tuple[Any, Tensor]]:
        for _, sharded, part in self._state.placed():
            values = part.of(self.zero.gradients, self.zero.rank)
            if values is not None and self.zero.counts:
                yield sharded, values

    def updates(self) -> int:
        steps = {int(entry["step"]) for entry in self.zero.adam.state.values() if "step" in entry}
        assert len(steps) <= 1, "parameters were updated different numbers of times"
        return steps.pop() if steps else 0

    def state(self) -> dict[str, Any]:
        return self._state.collect()

    def room_for_state(self) -> dict[str, Any]:
        return self._state.room()

    def put_state(self, stored: dict[str, Any], updates: int) -> None:
        offload = self._run.optimizer.offload  # DeepSpeed's AdamW counts in whole numbers, torch's in tensors
        self._state.put(stored, lambda: updates if offload else torch.tensor(float(updates)))

    def weights(self) -> dict[str, Any]:
        return self._state.room_for_weights()

    def put_weights(self, weights: dict[str, Tensor]) -> None:
        self._state.put_weights(weights)

    def close(self) -> None:
        self.zero.close()


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Trained parameters by dtype, bf16 first, and by whether they decay; `wd_mult` as megatron-core names it."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups.setdefault((parameter.dtype == torch.float32, not decays(parameter)), []).append(parameter)
    return [{"params": groups[key], "wd_mult": 0.0 if key[1] else 1.0} for key in sorted(groups)]
