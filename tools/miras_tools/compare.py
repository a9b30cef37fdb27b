"""miras-compare: are two runs the same, apart by rounding, or is one of them wrong?

Compares loss, gradient norm and, where recorded (logging.gradients_every), the norm of every parameter's gradient, step
by step, against published tolerances. Exit code 0: equal or drift; 1: failure; 2: bad input, said in one line.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from miras_megatron.config.unread import quiet_when_unread

from .compare_runs import Inference, Recorded, infer, read_run
from .compare_verdict import LOSS, NORM, PARAMETER, TOLERANCES, Difference, Kind, StepVerdict, judge

EXAMPLES = """
verdicts of a step: equal (the same to the last bit), drift (within the tolerance), failure.
The tolerances and their reasons: docs/testing.md, "Two runs".

example: does a layout of two tensor-parallel ranks train the same model?
  miras-train CONFIG --run.dir=runs/one --training.steps=50 --logging.gradients_every=1
  torchrun --nproc-per-node 2 --no-python miras-train CONFIG --run.dir=runs/two --parallel.tensor=2 \\
    --training.steps=50 --logging.gradients_every=1
  miras-compare runs/one runs/two
"""


def main(argv: list[str] | None = None) -> int:
    """See the module's docstring for the exit codes."""
    options = _parser().parse_args(argv)
    try:
        return quiet_when_unread(lambda: compare(options))
    except ValueError as error:
        print(f"miras-compare: {error}", file=sys.stderr)
        return 2


def compare(options: argparse.Namespace) -> int:
    """Read, judge, tell. Raises ValueError for bad input, before anything is printed."""
    if options.json and not Path(options.json).absolute().parent.is_dir():
        raise ValueError(f"--json {options.json}: no such folder; make it first")
    a, b = read_run(options.a), read_run(options.b)
    known = infer(a, b) if options.kind is None or (a.run and b.run) else None
    kind: Kind = options.kind or (known.kind if known else "same-layout")
    steps = common_steps(a, b, options.steps)
    found = [judge(step, steps[0], a.steps[step], b.steps[step], kind) for step in steps]
    print("\n".join([*_introduce(a, b, kind, known, options.kind is not None), *_tell(found, kind, known)]))
    if options.json:
        Path(options.json).write_text(json.dumps(report(a, b, kind, known, found), indent=1) + "\n", encoding="utf-8")
    return int(any(step.verdict == "failure" for step in found))


def common_steps(a: Recorded, b: Recorded, up_to: int | None) -> list[int]:
    """The steps that both recorded, rising. Raises ValueError where there are none, or one hasn't come to `up_to`."""
    for one in (a, b):
        if up_to is not None and max(one.steps) < up_to:
            raise ValueError(f"{one.name}: --steps {up_to}, but it ends at step {max(one.steps)}; ask for fewer")
    steps = sorted(step for step in a.steps.keys() & b.steps.keys() if up_to is None or step <= up_to)
    if not steps:
        spans = " and ".join(f"{min(one.steps)} to {max(one.steps)}" for one in (a, b))
        raise ValueError(f"{a.name}, {b.name}: no step in both ({spans}); name runs that overlap")
    return steps


def report(a: Recorded, b: Recorded, kind: Kind, known: Inference | None, found: list[StepVerdict]) -> dict[str, Any]:
    """What --json writes: all that is printed, and every step with each of its differences."""
    failed = [step for step in found if step.verdict == "failure"]
    return {
        "format": 1,
        "a": a.name,
        "b": b.name,
        "kind": kind,
        "layout_differs": known.layout if known else None,
        "training_differs": known.training if known else None,
        "verdict": _overall(found),
        "first_failing_step": failed[0].step if failed else None,
        "first_failing": failed[0].failures[0].quantity if failed else None,
        "steps": [
            {"step": s.step, "verdict": s.verdict, "differences": [_plain(asdict(d)) for d in s.differences]}
            for s in found
        ],
    }


def _introduce(a: Recorded, b: Recorded, kind: Kind, known: Inference | None, given: bool) -> Iterator[str]:
    layout = _pairs(known.layout) if known and known.layout else "the configurations have one layout and precision"
    yield f"{kind}: " + ("as --kind says" if given else f"inferred, since {layout}")
    yield f"  {TOLERANCES[kind].reason}"
    if known and known.training:
        yield f"  not the same training, so a failure is no surprise: {_pairs(known.training)}"
    only = [(one.name, len(one.steps.keys() - other.steps.keys())) for one, other in ((a, b), (b, a))]
    yield from (f"  {count} steps are only in {name} and aren't compared" for name, count in only if count)


def _tell(found: list[StepVerdict], kind: Kind, known: Inference | None) -> Iterator[str]:
    for verdict, group in groupby(found, key=lambda step: step.verdict):
        steps = list(group)
        span = f"step {steps[0].step}" if len(steps) == 1 else f"steps {steps[0].step} to {steps[-1].step}"
        yield f"{span}: {verdict}" + ("" if verdict == "equal" else f"; {_largest(steps)}")
    failed = next((step for step in found if step.verdict == "failure"), None)
    if failed is not None:
        yield from _explain(failed)
        if kind == "same-layout" and not (known and known.training):
            yield "  the number of data-parallel ranks isn't in a configuration: if it differs, say --kind other-layout"
    yield f"verdict: {_overall(found)}{MEANING[_overall(found)]}"


def _explain(step: StepVerdict) -> Iterator[str]:
    """The first failing step: how many are outside, and the parameter that is farthest."""
    outside = step.failures
    yield f"first failing step: {step.step}; {len(outside)} of {len(step.differences)} quantities are outside, farthest"
    yield f"  {outside[0]}"
    yield from (f"  {d}" for d in outside[1:] if d.quantity in (LOSS, NORM))
    if not step.has_gradients:
        yield "  no gradients were recorded at this step in both; logging.gradients_every=1 tells which parameter it is"


def _largest(steps: list[StepVerdict]) -> str:
    """The largest difference of each quantity over some steps, and what is allowed there."""
    worst: dict[str, Difference] = {}
    for difference in (d for step in steps for d in step.differences):
        name = difference.quantity if difference.quantity in (LOSS, NORM) else PARAMETER
        if name not in worst or difference.relative > worst[name].relative:
            worst[name] = difference
    return ", ".join(f"{name} up to {d.relative:.1e} (allowed {d.allowed:.1e})" for name, d in worst.items())


MEANING = {
    "equal": ": the same to the last bit",
    "drift": ": the same but for rounding, within the published bounds",
    "failure": ": not the same",
}
"""What a verdict means, in words."""


def _overall(found: list[StepVerdict]) -> str:
    verdicts = {step.verdict for step in found}
    return next(v for v in ("failure", "drift", "equal") if v in verdicts)


def _pairs(fields: dict[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{name} is {a!r} and {b!r}" for name, (a, b) in fields.items())


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity: they are written as their names."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="miras-compare",
        description="Are two runs the same, apart by rounding, or is one of them wrong? 0: equal or drift, 1: failure.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("a", metavar="A", help="a run folder, or a metrics.jsonl")
    parser.add_argument("b", metavar="B", help="the other")
    parser.add_argument("--steps", type=_positive, metavar="N", help="compare up to step N (all that both have)")
    parser.add_argument("--kind", choices=list(TOLERANCES), help="the tolerance (inferred from both config.yaml)")
    parser.add_argument("--json", metavar="FILE", help="also write every step and difference to FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
