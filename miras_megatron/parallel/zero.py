"""DeepSpeed's ZeRO around a model: the only file that touches deepspeed.

DeepSpeed partitions, over the ranks that share neither layers nor heads (data x context), AdamW's moments and fp32
masters (stage 1), the summed gradients too (2), the weights too (3). Its hooks sum gradients; everything after that,
dividing by tokens, norm and clipping, is ours, over the flat parts that it leaves on each rank.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .mesh import ParallelMesh
from .zero_compile import compiling_alone
from .zero_groups import Groups
from .zero_parts import ZeroModel
from .zero_stages import StateShards, WholeStates
from .zero_weights import WeightShards

VERSION = "0.19.8"
"""Of DeepSpeed, tested: what is touched here changes between its versions."""

INSTALL = f"pip install deepspeed=={VERSION}"


def refuse_without_deepspeed() -> None:
    """Raise ValueError where DeepSpeed isn't installed, or another version than the one that is known here."""
    if importlib.util.find_spec("deepspeed") is None:
        raise ValueError(f'optimizer.engine = "deepspeed": DeepSpeed is not installed here; {INSTALL}')
    try:
        found = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:  # a folder of that name
        found = "of no known version"
    if found.partition("+")[0] != VERSION:  # a build from source adds the commit
        raise ValueError(
            f'optimizer.engine = "deepspeed": DeepSpeed {found} is installed here, but its insides are touched as '
            f"{VERSION} has them; {INSTALL}"
        )


@dataclass(frozen=True)
class Adam:
    """What of AdamW doesn't change from step to step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@dataclass(frozen=True)
class Plan:
    """How DeepSpeed works.

    stage    0 to 3
    offload  moments and masters lie in host memory, where DeepSpeed's CPU AdamW updates them
    layers   of the model. In stage 3 the weights of each come and go together: what of a layer is called, and how
             often, hangs on the documents in a rank's rows, and ranks that gathered apart would wait forever
    """

    stage: int
    offload: bool = False
    layers: tuple[nn.Module, ...] = ()


def start_zero(model: nn.Module, groups: list[dict[str, Any]], adam: Adam, mesh: ParallelMesh, plan: Plan) -> ZeroModel:
    """`model` under DeepSpeed's ZeRO.

    groups   parameter groups of one dtype each, as torch's optimizers take them
    """
    deepspeed = _import_deepspeed(mesh)
    largest = max(weight.numel() for group in groups for weight in group["params"])
    if plan.stage == 3:
        deepspeed.utils.set_z3_leaf_modules(model, [type(layer) for layer in plan.layers])
    # The first group's dtype decides how DeepSpeed keeps gradients: this way in float32, in every stage.
    groups = sorted(groups, key=lambda group: group["params"][0].dtype.itemsize, reverse=plan.stage == 2)
    pairs = _add_masters(groups) if plan.stage == 0 else []
    local_rank = {"LOCAL_RANK": str(mesh.info.local_rank)}  # asked for where no launcher of torch's was at work
    with _in_their_dtypes(), patch.dict(os.environ, local_rank):
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=_make_adam(groups, adam, plan.offload, mesh),
            config=_settings(plan.stage, plan.offload, mesh, largest),
            mpu=Groups(mesh),
            dist_init_required=False,
        )
    if plan.stage == 0:
        return WholeStates(engine, mesh, pairs)
    if plan.stage < 3:
        return StateShards(engine, mesh)
    return WeightShards(engine, mesh, plan.layers, undo=_compare_orders_within(mesh.groups.dp_cp))


def _compare_orders_within(group: Any) -> Callable[[], object]:
    """Let stage 3 compare among the ranks of `group` in which order they called the model's parts; how to undo it.

    It asks all ranks of the run, but another stage of a pipeline calls others, at other times.
    """
    from deepspeed.runtime.zero import partitioned_param_coordinator

    def compare(numbers: list[int]) -> None:
        order = [number - min(numbers) for number in numbers]  # counted up in a process, over all models it had
        orders: list[list[int] | None] = [None] * group.size()
        dist.all_gather_object(orders, order, group=group)
        if any(other != order for other in orders):
            ranks = dist.get_process_group_ranks(group)
            raise RuntimeError(f"ranks {ranks} called parts of the model in different orders: {orders}"[:2000])

    patcher = patch.object(partitioned_param_coordinator, "assert_ints_same_as_other_ranks", compare)
    patcher.start()
    return patcher.stop


def _add_masters(groups: list[dict[str, Any]]) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """(weight, float32 master) of all weights; the groups are of masters after it."""
    found = []
    for group in groups:
        pairs = [(w, w if w.dtype == torch.float32 else nn.Parameter(w.detach().float())) for w in group["params"]]
        group["params"] = [master for _, master in pairs]
        found += pairs
    return found


def make_universal(source: Path, target: Path) -> None:
    """DeepSpeed's own checkpoint in `source` as a universal one, by DeepSpeed's converter, which unpickles it."""
    refuse_without_deepspeed()
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(
        Namespace(
            input_folder=str(source),
            output_folder=str(target),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=False,
        )
    )


def _import_deepspeed(mesh: ParallelMesh) -> Any:
    """DeepSpeed, over the process group there is.

    On a CPU it would compile an operation for shared memory at once, for minutes, and a run that is killed meanwhile
    leaves a lock on which all later ones wait forever; torch's own collectives do.
    """
    refuse_without_deepspeed()
    if mesh.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False, verbose=False)
    return deepspeed


def _settings(stage: int, offload: bool, mesh: ParallelMesh, largest: int) -> dict[str, Any]:
    """DeepSpeed's configuration, for weights of at most `largest` numbers.

    Its precision is left at fp32, since it would cast our float32 weights to bf16. Each group of parameters has one
    dtype, and gradients are summed, sent and kept in float32. Clipping is stated, for it is on (1.0) where nothing is
    said; it is done outside.
    """
    zero: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": stage < 3,
        "overlap_comm": False,
        "reduce_bucket_size": max(5 * 10**7, largest),  # what doesn't fit in is summed in its own dtype
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,  # else what is used again within 10^9 numbers stays whole: all of most models
    }
    if stage in (1, 2) and not offload:
        zero["compute_grad_norm"] = False
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": mesh.device.type == "cuda"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "gradient_allreduce_op": "mean" if stage == 3 else "sum",
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": False,
        "zero_optimization": zero,
    }


def _make_adam(groups: list[dict[str, Any]], adam: Adam, offload: bool, mesh: ParallelMesh) -> torch.optim.Optimizer:
    """DeepSpeed's CPU AdamW forgets weight decay unless told (its default is 0), so everything is stated."""
    options: dict[str, Any] = {
        "lr": adam.lr,
        "betas": (adam.beta1, adam.beta2),
        "eps": adam.eps,
        "weight_decay": adam.weight_decay,
    }
    if not offload:
        return torch.optim.AdamW(groups, **options)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    made: list[torch.optim.Optimizer] = []
    if mesh.info.local_rank == 0:  # one rank a machine, which compiles it where it wasn't yet
        with compiling_alone():
            made.append(DeepSpeedCPUAdam(groups, adamw_mode=True, **options))
    mesh.barrier("compiling DeepSpeed's CPU AdamW")
    return made[0] if made else DeepSpeedCPUAdam(groups, adamw_mode=True, **options)


@contextmanager
def _in_their_dtypes() -> Iterator[None]:
    """Inside, stage 3 lays the parts of weights of each dtype end to end; it expects all to have the same."""
    from deepspeed.runtime.zero import stage3

    plain = stage3.defragment

    def by_dtype(tensors: list[Tensor]) -> dict[torch.dtype, Tensor]:
        kinds = dict.fromkeys(tensor.dtype for tensor in tensors)
        return {kind: plain([tensor for tensor in tensors if tensor.dtype == kind]) for kind in kinds}

    def set_flats(self: Any) -> None:
        taken = dict.fromkeys(self.lp_param_buffer, 0)
        for weights in self.fp16_groups:
            kind, length = weights[0].dtype, sum(weight.partition_numel() for weight in weights)
            self.fp16_partitioned_groups_flat.append(self.lp_param_buffer[kind].narrow(0, taken[kind], length))
            taken[kind] += length

    optimizer = stage3.DeepSpeedZeroOptimizer_Stage3
    with (
        patch.object(stage3, "defragment", by_dtype),
        patch.object(optimizer, "_set_fp16_partitioned_groups_flat", set_flats),
    ):
        yield
