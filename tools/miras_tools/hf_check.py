"""Is an exported folder the model that was trained? Logits and greedy text, from transformers in a fresh process.

The other process has no module of ours to import, no network, and no cache of code from an earlier export.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from miras_megatron.config.schema import Run
from miras_megatron.training.generate import OpenedModel, open_model
from miras_megatron.training.session import Session
from miras_megatron.training.tokenizer import Tokenizer

WORKER = Path(__file__).parent / "hf_check_worker.py"

OLDEST = (4, 57)
"""version of transformers that loads exports"""

PROBE = """
from importlib.metadata import PackageNotFoundError, version
for name in ("torch", "transformers"):
    try:
        print(name, version(name))
    except PackageNotFoundError:
        print(name)
"""

PATIENCE = 120
"""seconds for an interpreter to say what it has"""

NEW_TOKENS = 32
"""of greedy text"""

BOUNDS = {"fp32": 1e-5, "bf16": 2e-2}
"""Largest difference of two logits over the largest logit. fp32: sums in another order. bf16: the layers between are
rounded to 8 bits, and another order of a sum rounds another way."""


@dataclass(frozen=True)
class Finding:
    """One comparison: what, how far apart, and whether that is within the bound."""

    what: str
    figure: str
    good: bool


def refuse_no_transformers(python: str) -> None:
    """Raise ValueError where the interpreter `python` can't load an exported folder."""
    versions = _versions(python)
    missing = [name for name, version in versions.items() if not version]
    packages, needed = " ".join(missing), " and ".join(missing)
    if not missing and _too_old(versions["transformers"]):
        packages = f"'transformers>={OLDEST[0]}.{OLDEST[1]}'"
        needed = f"transformers {OLDEST[0]}.{OLDEST[1]} or newer instead of {versions['transformers']}"
    if needed:
        raise ValueError(
            f"the check needs {needed} in {python}: pip install {packages}, name another interpreter with --python, "
            "or leave the check out with --no-check"
        )


def _versions(python: str) -> dict[str, str]:
    """Package -> its version there, empty where it isn't. Raises ValueError where `python` is no interpreter."""
    try:
        with tempfile.TemporaryDirectory(prefix="miras-check-") as scratch:
            done = subprocess.run([_absolute(python), "-c", PROBE], **_alone(Path(scratch)), timeout=PATIENCE)
        found = [line.partition(" ") for line in done.stdout.splitlines()]
        if done.returncode == 0 and [name for name, _, _ in found] == ["torch", "transformers"]:
            return {name: version for name, _, version in found}
        reason = f"is no working Python (exit code {done.returncode})"
    except subprocess.TimeoutExpired:
        reason = f"doesn't answer within {PATIENCE} seconds"
    except OSError as error:
        reason = f"can't be started ({error.strerror})"
    raise ValueError(f"--python {python}: {reason}; name a Python interpreter, or leave the check out with --no-check")


def _too_old(version: str) -> bool:
    """Whether a version of transformers is below the oldest that loads exports; one that can't be read isn't."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) < OLDEST


def _absolute(python: str) -> str:
    """The interpreter, by a path that holds in any folder; links stay, since a venv's interpreter is one."""
    return os.path.abspath(shutil.which(python) or python)


def _alone(scratch: Path) -> dict[str, Any]:
    """How another interpreter is started: in an empty folder, without the paths of this one's modules.

    Python's -I would hide what `pip install --user` put there, too.
    """
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    kept |= {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(scratch / "modules"), "TOKENIZERS_PARALLELISM": "false"}
    return {"cwd": scratch, "env": kept, "capture_output": True, "text": True}


def compare(checkpoint: Path, folder: Path, run: Run, tokenizer: Tokenizer, python: str) -> Iterator[Finding]:
    """Compare the checkpoint as it was trained, with its tokenizer, with the folder as transformers loads it.

    Raises ValueError where transformers can't load it at all.
    """
    lengths = check_lengths(run)
    assert run.model.vocab_size is not None
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(run.model.vocab_size, (1, length), generator=generator) for length in lengths]
    wanted = _expected(checkpoint, tokenizer, rows, run.model.vocab_size)
    gc.collect()  # modules of megatron-core hang in cycles; the other process needs their room
    with tempfile.TemporaryDirectory(prefix="miras-check-") as scratch:
        given = {f"tokens.{i}": row for i, row in enumerate(rows)}
        found = _in_fresh_process(folder, given, Path(scratch), python)
    bound = BOUNDS[run.training.precision]
    for i, length in enumerate(lengths):
        apart = relative(wanted[f"logits.{i}"], found[f"logits.{i}"])
        yield Finding(
            f"logits of {length} tokens", f"{apart:.1e} of the largest apart (bound {bound:.0e})", apart <= bound
        )
    yield judge_text(wanted["text"], wanted["text_logits"], found["text"], bound)


def check_lengths(run: Run) -> list[int]:
    """Tokens a row: shorter than a chunk, off the grid of chunks, and over several chunks, segments and windows."""
    letters, model, chunk = run.model.letters, run.model, run.memory.chunk_size
    spans = [chunk, model.segment if "c" in letters else 0, model.window if set(letters) & set("gw") else 0]
    return [3, chunk + 5, 3 * max(spans) + 7]


def relative(wanted: Tensor, found: Tensor) -> float:
    """The largest difference over the largest logit; infinite where the shapes differ or a value is no number."""
    if wanted.shape != found.shape or not bool(found.isfinite().all()):
        return float("inf")
    return float((wanted - found).abs().max() / wanted.abs().max())


def judge_text(wanted: Tensor, logits: Tensor, found: Tensor, bound: float) -> Finding:
    """Greedy tokens [n] of training with the logits [n, V] they were picked from, and transformers' tokens.

    Where they part, two tokens whose logits rounding can't tell apart may have changed places; then the texts
    go different ways, and what comes after isn't compared.
    """
    what, count = "greedy text", len(wanted)
    if found.shape != wanted.shape:
        return Finding(what, f"{len(found)} tokens instead of {count}", False)
    parted = (wanted != found).nonzero().flatten().tolist()
    if not parted:
        return Finding(what, f"{count} of {count} tokens the same", True)
    at = parted[0]
    gap = float((logits[at].max() - logits[at, found[at]]) / logits[at].abs().max())
    told = f"the first {at} of {count} tokens the same, then two whose logits are {gap:.1e} apart (bound {bound:.0e})"
    return Finding(what, told, gap <= bound)


def _expected(checkpoint: Path, tokenizer: Tokenizer, rows: list[Tensor], vocabulary: int) -> dict[str, Tensor]:
    """What the training model says, which lives no longer than this call."""
    with open_model(checkpoint, tokenizer) as opened:
        return _trained(opened, rows, vocabulary)


@torch.inference_mode()
def _trained(opened: OpenedModel, rows: list[Tensor], vocabulary: int) -> dict[str, Tensor]:
    """Logits of every row, and greedy text after the second with the logits of each of its tokens."""
    device = next(opened.model.parameters()).device
    found = {f"logits.{i}": opened.model(row.to(device))[0, :, :vocabulary].float().cpu() for i, row in enumerate(rows)}
    session, text, picked = Session(), [], []
    unread = rows[1][0].tolist()
    for _ in range(NEW_TOKENS):
        picked.append(session.read(opened.model, unread)[:vocabulary].cpu())
        text.append(int(picked[-1].argmax()))
        unread = text[-1:]
    return found | {"text": torch.tensor(text), "text_logits": torch.stack(picked)}


def _in_fresh_process(folder: Path, given: dict[str, Tensor], scratch: Path, python: str) -> dict[str, Tensor]:
    save_file(given, scratch / "given.safetensors")
    worker = shutil.copy(WORKER, scratch)  # Python puts the folder of a program first among those of its modules
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # what the training model lay in, or the device holds two
    words = [_absolute(python), str(worker), str(folder.absolute()), str(scratch), str(NEW_TOKENS)]
    done = subprocess.run(words, **_alone(scratch))
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        raise ValueError(
            f"{folder}: transformers can't load it: {lines[-1]}\n" + "\n".join(f"  {x}" for x in lines[-8:])
        )
    print(done.stdout.strip(), file=sys.stderr, flush=True)
    return load_file(scratch / "found.safetensors")
