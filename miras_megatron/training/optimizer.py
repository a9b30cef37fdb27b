"""AdamW over megatron-core's DDP: gradients summed over data-parallel ranks in float32, fp32 masters of bf16 weights.

megatron-core's optimizers leave a group's learning rate and weight decay to the trainer; `set_rates` writes both
at every step (with torch's AdamW a group of `wd_mult` 0 would otherwise still decay).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, ParamKey, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer_config import ParamPredicate
from torch import nn

from ..config.schema import Optimizer, Run
from ..model.initialise import decays
from .moments import Place, find_places

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's two moments in its state."""


def wrap_model(model: nn.Module, config: Any, *, distributed: bool = False) -> DistributedDataParallel:
    """The model under megatron-core's DDP, whose gradient buffers are float32 whatever the weights are.

    config       the model's TransformerConfig, into which the schedule's hooks go
    distributed  a rank gets the sums of the gradients it updates with, not of all
    """
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
    wrapped = DistributedDataParallel(config, settings, model)
    config.no_sync_func = wrapped.no_sync
    config.finalize_model_grads_func = finalize_model_grads
    return wrapped


def make_optimizer(run: Run, model: DistributedDataParallel, config: Any) -> MegatronOptimizer:
    """AdamW in two groups: parameters that decay and those that don't (`decays`)."""
    bf16 = run.training.precision == "bf16"
    settings = OptimizerConfig(
        optimizer="adam",
        lr=run.optimizer.lr,
        min_lr=run.optimizer.min_lr,
        weight_decay=run.optimizer.weight_decay,
        adam_beta1=run.optimizer.beta1,
        adam_beta2=run.optimizer.beta2,
        adam_eps=run.optimizer.eps,
        clip_grad=run.optimizer.clip,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=run.optimizer.distributed,
    )
    still = ParamKey(predicate=ParamPredicate(name="no_weight_decay", fn=lambda p: not decays(p)))
    optimizer = get_megatron_optimizer(
        settings, [model], config_overrides={still: {"wd_mult": 0.0}}, use_gloo_process_groups=False
    )
    config.grad_scale_func = optimizer.scale_loss
    return optimizer


def set_rates(optimizer: MegatronOptimizer, lr: float, settings: Optimizer) -> None:
    """Give every group its learning rate and weight decay for the next update."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)
        group["weight_decay"] = settings.weight_decay * group.get("wd_mult", 1.0)


def gradient_norm(optimizer: MegatronOptimizer) -> float:
    """Move summed gradients to where the optimizer reads them; their global l2 norm over all model ranks."""
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def clip_and_update(optimizer: MegatronOptimizer, norm: float, clip: float) -> None:
    """Scale gradients to at most `clip` (0: as they are) and update the weights. `gradient_norm` goes before it."""
    parameters = optimizer_parameters(optimizer)
    if clip > 0 and parameters:
        clip_grad_by_total_norm_fp32(parameters, max_norm=clip, total_norm=norm)
    optimizer.step_with_ready_grads()


def optimizer_parameters(optimizer: MegatronOptimizer) -> list[torch.Tensor]:
    """What AdamW updates on this rank: parameters, their float32 masters, or flat parts of either."""
    return [p for group in optimizer.param_groups for p in group["params"]]


# -- what a checkpoint keeps of AdamW ----------------------------------------------------------------
# core's own optimizer.sharded_state_dict numbers all parameters but looks up only the bf16 ones, so with weights of
# both precisions (ours: bf16 projections, float32 memory and norms) it pairs moments with other weights' names.
# Its distributed optimizer saves torch's AdamW but can't load it. Both are stored as whole weights here, alike.


def moment_tensors(optimizer: MegatronOptimizer, weights: dict[str, Any]) -> dict[str, Any]:
    """ShardedTensors of both moments of every weight, and of the fp32 master of every bf16 one. A collective call.

    weights  the model's sharded state, whose `data` are the parameters themselves
    Parameters that aren't trained have none. Where ranks share the moments, each returns those it keeps.
    Raises ValueError where a trained one isn't in `weights`.
    """
    tensors: dict[str, Any] = {}
    for name, sharded, place in _placed(optimizer, weights):
        for part, values in _kept(optimizer, place).items():
            whole = place.whole(values)
            if whole is not None:
                written = sharded if place.spans is None else _written_here(sharded)
                tensors[f"{name}/{part}"] = make_sharded_optimizer_tensor(written, whole, f"optimizer.{part}")
    return tensors


def _placed(optimizer: MegatronOptimizer, weights: dict[str, Any]) -> Iterator[tuple[str, Any, Place]]:
    """(name, sharded weight, place) of every trained weight once, in the same order on all ranks that share it."""
    places = find_places(optimizer, [sharded.data for sharded in weights.values()])
    for name, sharded in weights.items():
        place = places.pop(id(sharded.data), None)
        if place is not None:
            yield name, sharded, place


def _kept(optimizer: MegatronOptimizer, place: Place) -> dict[str, torch.Tensor | None]:
    """What AdamW keeps of a weight on this rank, by name; None where it keeps none of it."""
    names = (*MOMENTS, "master") if place.has_master else MOMENTS
    if place.updated is None:
        return dict.fromkeys(names)
    state = optimizer.optimizer.state[place.updated]
    return {name: place.updated.data if name == "master" else state[name] for name in names}


def _written_here(sharded: Any) -> Any:
    """The same place in the checkpoint, but this rank writes it, not the first of those that hold the weight alike."""
    return replace(sharded, replica_id=(*sharded.replica_id[:-1], 0))


def updates_done(optimizer: MegatronOptimizer) -> int:
    """Updates that AdamW has made; its bias correction hangs on it."""
    places = [*optimizer.optimizer.state.values(), *_groups_in_use(optimizer)]
    steps = {int(place["step"]) for place in places if "step" in place}
    assert len(steps) <= 1, "parameters were updated different numbers of times"
    return steps.pop() if steps else 0


def _groups_in_use(optimizer: MegatronOptimizer) -> list[dict[str, Any]]:
    """Groups without parameters on this rank are passed over by the fused AdamW, which doesn't count there."""
    return [group for group in optimizer.param_groups if group["params"]]


def make_moments(optimizer: MegatronOptimizer) -> None:
    """Give every trained parameter zero moments, to be read into."""
    for p in optimizer_parameters(optimizer):
        optimizer.optimizer.state[p] = {part: torch.zeros_like(p, dtype=torch.float32) for part in MOMENTS}


@torch.no_grad()
def put_moments(
    optimizer: MegatronOptimizer, weights: dict[str, Any], stored: dict[str, torch.Tensor], updates: int
) -> None:
    """Set moments, masters and the number of updates to what was read under the names of `moment_tensors`.

    A collective call.
    """
    for name, _, place in _placed(optimizer, weights):
        for part, values in _kept(optimizer, place).items():
            place.put(stored.get(f"{name}/{part}"), values)
    if isinstance(optimizer.optimizer, torch.optim.AdamW):
        for state in optimizer.optimizer.state.values():
            state["step"] = torch.tensor(float(updates))
    else:  # the fused AdamW of TransformerEngine and apex counts a group at a time
        for group in _groups_in_use(optimizer):
            group["step"] = updates
