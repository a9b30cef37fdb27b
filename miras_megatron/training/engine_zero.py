"""The engine of DeepSpeed's ZeRO: gradients as sums over tokens, divided, measured and clipped as megatron-core does.

DeepSpeed leaves on each rank the flat parts of summed gradients that it updates with. Here they become what core's
`finalize_model_grads` makes: those of sequence-parallel weights added over tensor-parallel ranks, those of a tied
embedding over its two stages, all divided once by the tokens of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor, nn

from ..config.schema import Run
from ..model.initialise import decays
from ..model.language_model import MemoryLanguageModel
from ..parallel.mesh import ParallelMesh
from ..parallel.shares import collect_parts, deal_parts
from ..parallel.zero import Adam, Plan, start_zero
from ..parallel.zero_parts import Part
from .engine_core import put_weights
from .optimizer import MOMENTS


class ZeroEngine:
    """See `engine.Engine`."""

    def __init__(self, run: Run, model: MemoryLanguageModel, mesh: ParallelMesh):
        optimizer = run.optimizer
        self._run, self._bare, self._mesh = run, model, mesh
        adam = Adam(optimizer.lr, optimizer.beta1, optimizer.beta2, optimizer.eps, optimizer.weight_decay)
        self.zero = start_zero(model, parameter_groups(model), adam, mesh, self._plan())
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
            for weight, part in self._own(self.zero.gradients)
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

    def _own(self, flats: list[Tensor]) -> Iterator[tuple[Part, Tensor]]:
        """(weight, this rank's part of it in `flats`) where it has one."""
        for part in self.zero.parts:
            values = part.of(flats, self.zero.rank)
            if values is not None:
                yield part, values

    def gradient_norm(self) -> float:
        """As in core, a weight that ranks hold alike counts on the first of them."""
        square = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        for part, gradient in self._own(self.zero.gradients):
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
        for _, sharded, part in self._placed(self._named()):
            values = part.of(self.zero.gradients, self.zero.rank)
            if values is not None and self.zero.counts:
                yield sharded, values

    def updates(self) -> int:
        steps = {int(entry["step"]) for entry in self.zero.adam.state.values() if "step" in entry}
        assert len(steps) <= 1, "parameters were updated different numbers of times"
        return steps.pop() if steps else 0

    def state(self) -> dict[str, Any]:
        return {"weights": self.weights(), "moments": self._moments()}

    def room_for_state(self) -> dict[str, Any]:
        return self.state()

    def weights(self) -> dict[str, Any]:
        """In stage 3 each on one rank, which writes and reads it: they take turns."""
        named = self._named()
        if self.zero.shards is None:
            return named
        return {name: replace(mine, data=whole) for name, mine, whole in self._wholes(named, self.zero.shards)}

    def _named(self) -> dict[str, Any]:
        """Name -> where in the checkpoint a weight belongs."""
        with self.zero.whole_shapes():
            named: dict[str, Any] = self._bare.sharded_state_dict()
        return named

    def _moments(self) -> dict[str, Any]:
        """ShardedTensors of both moments of every weight, and of the fp32 master of every bf16 one."""
        named = self._named()
        kinds = {name: self.zero.state(name) for name in MOMENTS} | {"master": self.zero.masters}
        return {
            f"{name}/{kind}": make_sharded_optimizer_tensor(mine, whole, f"optimizer.{kind}")
            for kind, flats in kinds.items()
            for name, mine, whole in self._wholes(named, flats, low_only=kind == "master")
        }

    def _wholes(
        self, named: dict[str, Any], flats: list[Tensor], *, low_only: bool = False
    ) -> Iterator[tuple[str, Any, Tensor]]:
        """(name, its place, the whole tensor) of those that this rank brings together from all ranks' `flats`."""
        for turn, (name, sharded, part) in enumerate(self._placed(named, low_only)):
            here, device = self._part(part, flats).detach(), self._mesh.device
            whole = collect_parts(here, part.spans, self.zero.group, part.shape, turn=turn, device=device)
            if whole is not None:
                replica = (*sharded.replica_id[:-1], 0) if len(part.spans) > 1 else sharded.replica_id
                yield name, replace(sharded, replica_id=replica, data=None), whole

    def _placed(self, named: dict[str, Any], low_only: bool = False) -> Iterator[tuple[str, Any, Part]]:
        """(name, its place, part) of every trained weight, in the same order on all ranks that share it.

        low_only  only those in bf16
        """
        parts = {id(part.weight): part for part in self.zero.parts}
        for name, sharded in named.items():
            part = parts.pop(id(sharded.data), None)
            if part is not None and not (low_only and part.weight.dtype == torch.float32):
                yield name, sharded, part
        if parts:
            raise ValueError(
                f"{len(parts)} trained parameters are not in the model's sharded state: they can't be saved"
            )

    def _part(self, part: Part, flats: list[Tensor]) -> Tensor:
        """This rank's, of no length where it has none."""
        values = part.of(flats, self.zero.rank)
        return flats[part.flat].new_empty(0) if values is None else values

    @torch.no_grad()
    def put_state(self, stored: dict[str, Any], updates: int) -> None:
        moments = stored.get("moments", {})  # core leaves out what is empty: a rank may have read nothing
        self._put(stored.get("weights", {}))
        self._set_masters(low_too=False)  # of bf16 weights they were read, some into their very place
        for kind in MOMENTS:
            self._deal(moments, f"/{kind}", self.zero.state(kind))
        self._deal(moments, "/master", self.zero.masters, low_only=True)
        for entry in self.zero.adam.state.values():
            entry["step"] = updates if self._run.optimizer.offload else torch.tensor(float(updates))

    def _deal(self, stored: dict[str, Tensor], suffix: str, flats: list[Tensor], *, low_only: bool = False) -> None:
        """Hand out to all ranks' `flats` what each rank read."""
        for turn, (name, _, part) in enumerate(self._placed(self._named(), low_only)):
            whole, values = stored.get(name + suffix), self._part(part, flats)
            flat = None if whole is None else whole.reshape(-1)
            deal_parts(flat, values, part.spans, self.zero.group, turn=turn, device=self._mesh.device)

    @torch.no_grad()
    def put_weights(self, weights: dict[str, Tensor]) -> None:
        self._put(weights)
        self._set_masters(low_too=True)

    def close(self) -> None:
        self.zero.close()

    def _put(self, weights: dict[str, Tensor]) -> None:
        if self.zero.shards is None:
            put_weights(self._bare, weights)
        else:
            self.zero.give_away()
            self._deal(weights, "", self.zero.shards)

    def _set_masters(self, low_too: bool) -> None:
        """Make masters the weights, those of bf16 weights only where `low_too`."""
        shards = self.zero.shards
        for part, master in self._own(self.zero.masters):
            start, end = part.spans[self.zero.rank]
            if low_too or part.weight.dtype == torch.float32:
                master.copy_(part.weight.view(-1)[start:end] if shards is None else self._part(part, shards))


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Trained parameters by dtype, bf16 first, and by whether they decay; `wd_mult` as megatron-core names it."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups.setdefault((parameter.dtype == torch.float32, not decays(parameter)), []).append(parameter)
    return [{"params": groups[key], "wd_mult": 0.0 if key[1] else 1.0} for key in sorted(groups)]
