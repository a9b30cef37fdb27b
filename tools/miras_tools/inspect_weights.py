"""miras-inspect PATH | --diff A B: what a checkpoint or an exported folder holds, a tensor at a time, without a GPU.

Exit code 0: whole, or the same; 1: damaged, not finite or not what the configuration describes, or different; 2: bad
input, or a folder whose configuration or index can't be read, said in one message.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from miras_megatron.config.schema import Run, flatten
from miras_megatron.config.sizes import state_bytes
from miras_megatron.model.build import part_of
from miras_megatron.training.main import one_message

from .held_weights import HeldWeights, open_held
from .hf_config import described
from .hf_names import VOCABULARY, to_hf
from .hf_shapes import state_shapes
from .tensor_progress import TensorProgress

EXAMPLES = """
examples:
  miras-inspect runs/book                             its latest checkpoint: configuration, sizes, norms by part
  miras-inspect exported/book --tensors               every tensor of an exported folder
  miras-inspect --diff runs/book exported/book        are they the same weights?
"""


def main(argv: Sequence[str] | None = None) -> int:
    """See the module's docstring for the exit codes."""
    options = _parser().parse_args(argv)
    return one_message("miras-inspect", lambda: inspect(options))


def inspect(options: argparse.Namespace) -> int:
    """Describe one, or compare two. Raises ValueError for what a user can mend."""
    if options.diff:
        return compare(*(open_held(Path(path), options.verify) for path in options.diff), as_json=options.json)
    return describe(open_held(Path(options.path), options.verify), options.tensors, as_json=options.json)


# -- one ---------------------------------------------------------------------------------------------
def describe(held: HeldWeights, every: bool, *, as_json: bool = False) -> int:
    """Print what `held` is; `every` tensor on a line of its own."""
    problems = list(held.problems)
    rows = list(_rows(held, problems))
    parts = _by_part(rows)
    problems += [f"{row['name']} holds values that are not finite" for row in rows if not row["finite"]]
    if as_json:
        facts = dict(held.facts) | {"parameters": sum(row["numbers"] for row in rows)}
        said = {"path": str(held.folder), "kind": held.kind, "facts": facts, "parts": parts, "problems": problems}
        _print_json(said | {"state_bytes": state_bytes(held.run), "tensors": rows})
        return int(bool(problems))
    print(f"{held.folder}")
    for name, text in [*held.facts, *_model_facts(held.run)]:
        print(f"  {name:<12}{text}")
    padding = _padding_numbers(held.run, rows)
    of_these = f", {padding:,} of them in rows beyond the vocabulary" if padding else ""
    print(f"  {'parameters':<12}{sum(row['numbers'] for row in rows):,}{of_these}")
    print("\n" + "\n".join(_table(rows if every else parts, "tensor" if every else "part")))
    _complain(problems)
    return int(bool(problems))


def _padding_numbers(run: Run, rows: Sequence[dict[str, Any]]) -> int:
    """How many of the weights belong to no token."""
    tables = [row["shape"] for row in rows if to_hf(row["name"]) in VOCABULARY]
    return sum((shape[0] - (run.model.vocab_size or shape[0])) * shape[1] for shape in tables)


def _complain(problems: Sequence[str]) -> None:
    for problem in problems:
        print(f"miras-inspect: {problem}", file=sys.stderr)


def _print_json(said: dict[str, Any]) -> None:
    print(json.dumps(_plain(said), indent=1, allow_nan=False))


def _plain(value: Any) -> Any:
    """The value with null for what is no number: JSON has no word for it."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _model_facts(run: Run) -> Iterator[tuple[str, str]]:
    model = run.model
    yield "model", f"layers {model.letters}, hidden {model.hidden}, {model.heads} heads, MLP {model.ffn_width}"
    yield (
        "memory",
        f"rule {run.memory.rule}, chunks of {run.memory.chunk_size}, choices {run.memory.choices or 'its own'}",
    )
    yield "vocabulary", f"{model.vocab_size} tokens, {model.padded_vocab()} rows; tokenizer {run.data.tokenizer}"
    yield "precision", run.training.precision
    grows = "; full attention's cache grows on top" if "a" in model.letters else ""
    yield "state", f"{state_bytes(run):,} bytes a sequence, whatever its length{grows}"
    for letter, shapes in state_shapes(run).items():
        yield f"  layer {letter}", ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in shapes.items())


def _rows(held: HeldWeights, problems: list[str]) -> Iterator[dict[str, Any]]:
    """Of every tensor its shape, dtype, norm, root mean square and largest value; what can't be read is a problem."""
    told = TensorProgress("read", len(held.names), held.nbytes)
    for name in held.names:
        try:
            tensor = held.read(name)
        except ValueError as error:
            problems.append(str(error))
            continue
        told.add(tensor.nbytes)
        wide = tensor.double()
        norm = float(torch.linalg.vector_norm(wide))
        yield {
            "name": name,
            "part": part_of(name),
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "numbers": tensor.numel(),
            "norm": norm,
            "rms": norm / max(tensor.numel(), 1) ** 0.5,
            "largest": float(wide.abs().max()) if tensor.numel() else 0.0,
            "finite": bool(tensor.isfinite().all()),
        }


def _by_part(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same of all tensors of a part together."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["part"], row["dtype"]].append(row)
    found = []
    for (part, dtype), members in groups.items():
        numbers, squares = sum(row["numbers"] for row in members), sum(row["norm"] ** 2 for row in members)
        one = {"name": part, "dtype": dtype, "numbers": numbers, "norm": squares**0.5}
        found.append(one | {"rms": (squares / numbers) ** 0.5, "largest": max(row["largest"] for row in members)})
    return sorted(found, key=lambda row: -row["numbers"])


def _table(rows: Sequence[dict[str, Any]], first: str) -> Iterator[str]:
    width = max([len(first), *(len(row["name"]) for row in rows)])
    yield f"  {first:<{width}}  {'dtype':<9}{'numbers':>14}{'norm':>12}{'rms':>12}{'largest':>12}  shape"
    for row in rows:
        shape = "x".join(map(str, row.get("shape", [])))
        numbers = f"{row['numbers']:>14,}{row['norm']:>12.4g}{row['rms']:>12.4g}{row['largest']:>12.4g}"
        yield f"  {row['name']:<{width}}  {row['dtype']:<9}{numbers}  {shape}".rstrip()


# -- two ---------------------------------------------------------------------------------------------
def compare(a: HeldWeights, b: HeldWeights, *, as_json: bool = False) -> int:
    """Print where two differ: configuration, tensors that only one has, and how far apart the others are."""
    unset = [held.folder for held in (a, b) if not held.settings]
    fields = {} if unset else _differing(flatten(a.run), flatten(b.run))
    function = _differing(_function(a.run), _function(b.run))
    only = {str(x.folder): [n for n in x.names if n not in set(y.names)] for x, y in ((a, b), (b, a))}
    rows = [_compared(name, a, b) for name in a.names if name in set(b.names)]
    differ = [row for row in rows if row["difference"] != 0.0]
    problems = [f"{held.folder}: {problem}" for held in (a, b) for problem in held.problems]
    if as_json:
        said = {"fields": fields, "function": function, "only": only, "tensors": differ, "compared": len(rows)}
        _print_json(said | {"problems": problems})
    else:
        print(f"A {a.folder} ({a.kind})\nB {b.folder} ({b.kind})")
        for place in unset:
            print(f"  {place} has no training_config.yaml: only the model and its weights are compared")
        for name, (was, now) in fields.items():
            print(f"  {name}: {was} | {now}")
        for name, (was, now) in function.items():
            print(f"  another model: {name} {was} | {now}")
        for folder, names in only.items():
            for name in names:
                print(f"  only in {folder}: {name}")
        print(f"  {len(rows) - len(differ)} of {len(rows)} tensors are the same to the last bit")
        for row in sorted(differ, key=lambda row: -row["difference"]):
            print(f"  {row['name']}: {row['text']}")
        _complain(problems)
    return int(bool(differ or function or any(only.values()) or problems))


def _function(run: Run) -> dict[str, Any]:
    """What the same weights hang on to be the same model."""
    told = described(run) | {"vocab_size": run.model.vocab_size}
    return {name: value for name, value in told.items() if name not in ("seed", "checkpoint_every")}


def _differing(one: dict[str, Any], other: dict[str, Any]) -> dict[str, list[str]]:
    """Name -> both values."""
    names = sorted(one.keys() | other.keys())
    return {n: [str(one.get(n)), str(other.get(n))] for n in names if one.get(n) != other.get(n)}


def _compared(name: str, a: HeldWeights, b: HeldWeights) -> dict[str, Any]:
    """How far apart two held tensors are; padding rows, which an export may lack, are left out where one does."""
    try:
        one, other = a.read(name), b.read(name)
    except ValueError as error:
        return {"name": name, "difference": float("inf"), "text": str(error)}
    tokens = a.run.model.vocab_size
    if to_hf(name) not in VOCABULARY or tokens != b.run.model.vocab_size:
        return _apart(name, one, other)
    if tokens == min(one.shape[0], other.shape[0]):
        return _apart(name, one[:tokens], other[:tokens])
    beyond = "" if _apart(name, one[:tokens], other[:tokens])["difference"] else ", all in rows beyond the vocabulary"
    found = _apart(name, one, other)
    return found | {"text": found["text"] + beyond}


def _apart(name: str, a: Tensor, b: Tensor) -> dict[str, Any]:
    """How far apart two tensors are, relative to A's norm."""
    if a.shape != b.shape:
        return {"name": name, "difference": float("inf"), "text": f"shapes {list(a.shape)} and {list(b.shape)}"}
    if a.dtype == b.dtype and torch.equal(_bits(a), _bits(b)):
        return {"name": name, "difference": 0.0, "text": ""}
    gap = float(torch.linalg.vector_norm(a.double() - b.double()))
    share = gap / max(float(torch.linalg.vector_norm(a.double())), 1e-300)
    kinds = "" if a.dtype == b.dtype else f", {a.dtype} and {b.dtype}"
    if math.isnan(share):
        return {"name": name, "difference": float("inf"), "text": f"differs, and holds what is no number{kinds}"}
    return {"name": name, "difference": share or 1e-300, "text": f"{share:.3g} of its norm apart{kinds}"}


def _bits(tensor: Tensor) -> Tensor:
    """Its bytes: -0.0 isn't 0.0 there, and what is no number is equal to its like."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="miras-inspect",
        description="What a checkpoint or an exported folder holds: configuration, layout, sizes, norms, integrity.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("path", nargs="?", metavar="PATH", help="a run folder, a checkpoint or an exported folder")
    what.add_argument("--diff", nargs=2, metavar=("A", "B"), help="compare two of them")
    parser.add_argument("--tensors", action="store_true", help="a line for every tensor, not for every part")
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    verify = "compare a checkpoint's files with their digests (default: yes)"
    parser.add_argument("--verify", action=argparse.BooleanOptionalAction, default=True, help=verify)
    return parser


if __name__ == "__main__":
    sys.exit(main())
