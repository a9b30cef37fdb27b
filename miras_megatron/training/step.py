"""One optimizer step: microbatches through megatron-core's schedule, gradients summed, checked, clipped, applied.

The loss is a sum and a count (`calculate_per_token_loss`): core adds both over microbatches and data-parallel ranks
and divides once, so that a token weighs the same wherever it was read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from ..parallel.micro_batches import run_forwards_ahead
from ..parallel.together import agreed, gather_objects, largest, sum_losses
from .batch import Batch, cut_for_rank
from .device_peaks import peak_gib
from .gradients import find_bad_gradient, gradient_norms
from .guard import BadStep, Finding, NotANumber, find_first, probed
from .job import Job
from .loss import summed_loss
from .metrics import StepReport
from .schedule import learning_rate
from .signs import alive
from .trouble import Trouble


def train_step(job: Job, step: int, *, look_inside: bool = False, look_at_gradients: bool = False) -> StepReport:
    """Update `step` (counted from 1). A collective call.

    look_inside        also record the inner loop of every memory layer, on the last microbatch
    look_at_gradients  also record the norm of every parameter's gradient
    A bad step (`Judge`) leaves weights, moments and carried states as they were, and is told in the report.
    """
    engine = job.engine
    assert engine is not None and job.feed is not None
    began = time.perf_counter()
    alive(f"step {step}", step)
    job.mesh.ring.drain_waits()
    batches = job.feed.step(step)
    lr = learning_rate(step, job.run.optimizer, job.run.training.steps)
    engine.begin_step(lr)
    passed = run_microbatches(job, batches, look_inside=look_inside)
    loss, norm = agreed(job.mesh, mean_loss(job, passed), engine.gradient_norm())
    gradients = gradient_norms(job) if look_at_gradients else {}
    memory = _gather_probes(job, passed.probes) if look_inside else {}
    trouble = job.judge.judge(loss, norm, memory)
    if trouble is None:
        engine.update(norm)
        for lanes, states in passed.states:
            job.carried.keep(lanes, states)
    seconds = time.perf_counter() - began
    job.waits = job.mesh.ring.drain_waits()
    tokens = sum(batch.tokens.numel() for batch in batches) * job.mesh.data
    return StepReport(
        step=step,
        loss=loss,
        grad_norm=norm,
        lr=lr,
        tokens=tokens,
        seconds=seconds,
        tokens_per_s=tokens / seconds,
        rows=job.feed.rows(),
        peak_gib=largest(job.mesh, peak_gib()),
        trouble=trouble,
        stops=None if trouble is None or trouble.action != "stop" else _stop(job, batches, step, trouble),
        memory=memory,
        gradients=gradients,
        idle=idle_shares(job, seconds),
    )


def idle_shares(job: Job, seconds: float) -> list[float]:
    """Of each rank: time spent waiting for a neighbour's state or gradient, over the step's; none with one rank."""
    if job.mesh.context == 1:
        return []
    return gather_objects(job.mesh, sum(wait.ended - wait.began for wait in job.waits) / seconds)


@dataclass
class Passed:
    """What the microbatches left behind on this rank.

    sums    float64 [n], added over microbatches; empty off the last stage
    states  (lanes, states after their rows), where states are carried
    probes  layer name -> quantity -> value
    """

    sums: list[Tensor] = field(default_factory=list)
    states: list[tuple[list[int], Any]] = field(default_factory=list)
    probes: dict[str, dict[str, float]] = field(default_factory=dict)


Measure = Callable[[Batch, Tensor], Tensor]
"""(batch, losses [b, T] in nats) -> float64 [n] sums to report."""


def loss_and_count(batch: Batch, losses: Tensor) -> Tensor:
    """[sum of weighed losses, sum of weights], float64."""
    weighed = losses.detach().double() * batch.loss_mask
    return torch.stack([weighed.sum(), batch.loss_mask.sum(dtype=torch.float64)])


def run_microbatches(
    job: Job,
    batches: list[Batch],
    *,
    training: bool = True,
    look_inside: bool = False,
    measure: Measure = loss_and_count,
) -> Passed:
    """Run the microbatches through megatron-core's schedule, forward and, where training, backward."""
    passed, model = Passed(), job.called
    rows, length = batches[0].tokens.shape[0], batches[0].row_tokens

    def forward(numbered: Iterator[tuple[int, Batch]], model: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        number, batch = next(numbered)
        probes: dict[str, dict[str, float]] = {}
        with probed(job.model) if look_inside and number == len(batches) - 1 else nullcontext(probes) as probes:
            output = _call(job, model, batch, passed)
        passed.probes |= probes
        return output, lambda losses: _report(batch, losses, passed, measure)

    numbered = enumerate(own_slice(job, batch) for batch in batches)
    ahead = job.layout.forwards_ahead
    if training and ahead > 0:
        run_forwards_ahead(forward, numbered, model, job.config, len(batches), ahead)
        _settle(job)
        return passed
    schedule: Any = get_forward_backward_func()
    with nullcontext() if training else torch.no_grad():
        schedule(
            forward_step_func=forward,
            data_iterator=numbered,
            model=[model],
            num_microbatches=len(batches),
            seq_length=length,
            micro_batch_size=rows,
            forward_only=not training,
        )
    _settle(job)
    return passed


def _settle(job: Job) -> None:
    """All packets of the step have gone; the next one's micro-batches count from 0."""
    job.mesh.ring.finish()
    if job.model.relay is not None:
        job.model.relay.calls = 0


def own_slice(job: Job, batch: Batch) -> Batch:
    """What this rank reads of a batch, on its device."""
    relay = job.model.relay
    if relay is not None:
        batch = cut_for_rank(batch, relay.cut(batch.tokens.shape[1]), job.mesh.context_rank)
    return batch.to(job.mesh.device)


def _call(job: Job, model: nn.Module, batch: Batch, passed: Passed) -> Tensor:
    """The stage's output for one microbatch: losses [b, T] on the last stage, hidden states before it."""
    if job.run.data.packing != "ordered":
        output: Tensor = model(
            batch.tokens, labels=batch.labels, cu_seqlens=batch.cu_seqlens, row_tokens=batch.row_tokens
        )
        return output
    losses = torch.empty(batch.tokens.shape, device=batch.tokens.device)
    for rows, states in job.carried.groups(batch):
        borders = None if batch.cu_seqlens is None else [batch.cu_seqlens[row] for row in rows]
        part, after = model(
            batch.tokens[rows], labels=batch.labels[rows], cu_seqlens=borders, states=states, return_states=True
        )
        losses = losses.index_put((torch.tensor(rows, device=losses.device),), part)
        passed.states.append((batch.lanes[rows].tolist(), after))
    return losses


def _report(batch: Batch, losses: Tensor, passed: Passed, measure: Measure) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """What the schedule asks of the last stage: (sum to differentiate, count to divide by, whatever else)."""
    passed.sums.append(measure(batch, losses))
    total, count = summed_loss(losses, batch.loss_mask)
    return total, count, {}


def mean_loss(job: Job, passed: Passed) -> float:
    """Nats a token over all ranks and microbatches; the same number on every rank."""
    here = sum(passed.sums, torch.zeros(2, dtype=torch.float64, device=job.mesh.device))
    total, count = sum_losses(job.mesh, here).tolist()
    return float(total / max(count, 1.0))


def _stop(job: Job, batches: list[Batch], step: int, trouble: Trouble) -> BadStep:
    """What the run stops with. Where a number is none, the failing microbatches run once more, forward only."""
    told = f"step {step}: {trouble.reason}; the weights are still those of step {step - 1}\n"
    nan, policy = trouble.kind == "nan", f"training.on_{trouble.kind}"
    ways = "a smaller optimizer.lr or memory.lr_max" + ("" if nan else ", a wider bound")
    if getattr(job.run.training, f"on_{trouble.kind}") == "stop":
        ways += f", or {policy}=skip or roll_back"
    if not nan:
        return BadStep(f"{told}way out: {ways}")
    return NotANumber(f"{told}first wrong: {_first_wrong(job, batches)}\nway out: {ways}")


def _first_wrong(job: Job, batches: list[Batch]) -> str:
    """Where the numbers went wrong, over all ranks."""
    here = find_first(job.model, lambda: run_microbatches_again(job, batches))
    here = here if here.place else find_bad_gradient(job)
    findings: list[Finding] = gather_objects(job.mesh, here)
    places = [
        f"{'rank ' + str(rank) + ': ' if job.mesh.world_size > 1 else ''}{finding}"
        for rank, finding in enumerate(findings)
        if finding.place
    ]
    return "\n".join(places) or "nothing that a second forward pass shows"


def run_microbatches_again(job: Job, batches: list[Batch]) -> None:
    """The forward pass of a step once more, from the same carried states, leaving no trace."""
    run_microbatches(job, batches, training=False)


def _gather_probes(job: Job, here: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Means over the ranks that hold a layer and the end of a row: heads of TP ranks, rows of data-parallel ranks."""
    here = here if job.mesh.context_rank == job.mesh.context - 1 else {}
    collected: dict[str, dict[str, list[float]]] = {}
    for part in gather_objects(job.mesh, here):
        for layer, values in part.items():
            for name, value in values.items():
                collected.setdefault(layer, {}).setdefault(name, []).append(value)
    return {
        layer: {name: sum(values) / len(values) for name, values in quantities.items()}
        for layer, quantities in sorted(collected.items())
    }
