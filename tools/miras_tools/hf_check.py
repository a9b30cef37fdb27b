"""Is an exported folder the model that was trained? Logits and greedy text, from transformers in a fresh process.

The other process has no module of ours to import, no network, and no cache of code from an earlier export.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from miras_megatron.config.schema import Run
from miras_megatron.training.generate import OpenedModel, open_model
from miras_megatron.training.session import Session
from miras_megatron.training.tokenizer import Tokenizer

WORKER = Path(__file__).parent / "hf_check_worker.py"

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
    code = "from importlib.util import find_spec as f; print(*(n for n in ('torch', 'transformers') if not f(n)))"
    try:
        done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=120)
    except OSError as error:
        raise ValueError(f"--python {python}: can't be started ({error.strerror}); name a Python interpreter") from None
    missing = done.stdout.split() if done.returncode == 0 else ["a working Python"]
    if missing:
        raise ValueError(
            f"the check needs {' and '.join(missing)} in {python}: pip install {' '.join(missing)}, name another "
            "interpreter with --python, or leave the check out with --no-check"
        )


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
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    alone = {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(scratch / "modules"), "TOKENIZERS_PARALLELISM": "false"}
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # what the training model lay in, or the device holds two
    words = [python, "-I", str(WORKER), str(folder.absolute()), str(scratch), str(NEW_TOKENS)]
    done = subprocess.run(words, cwd=scratch, env=kept | alone, capture_output=True, text=True)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        raise ValueError(
            f"{folder}: transformers can't load it: {lines[-1]}\n" + "\n".join(f"  {x}" for x in lines[-8:])
        )
    print(done.stdout.strip(), file=sys.stderr, flush=True)
    return load_file(scratch / "found.safetensors")
