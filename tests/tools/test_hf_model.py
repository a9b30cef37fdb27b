"""If these failed, people who never heard of this framework would get other text than those who trained the model.

Models with random weights are written as folders and loaded by transformers in another process, which can't import
anything of ours (tests/helpers/hf_cases.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.hf_folders import VOCAB, exported_model
from helpers.models import small_run
from miras_tools.hf_names import to_hf

from miras_megatron.config.schema import Run
from miras_megatron.memory import RULES
from miras_megatron.model.build import build_model
from miras_megatron.parallel.mesh import ParallelMesh

CASES = Path(__file__).resolve().parents[1] / "helpers/hf_cases.py"
PYTHON = os.environ.get("MIRAS_TRANSFORMERS_PYTHON", sys.executable)
"""An interpreter with torch and transformers; `make test-transformers` names those of other versions."""

CALM = 0.005
"""lr_max: at small_run's 0.1 memory tokens make 1e7 of a rounding within 200 tokens, yaad 1e10 (seen in float64),
so text would hang on how a prompt is cut"""

BLOCKS: dict[str, dict[str, Any]] = {
    "every block, untied": {"pattern": "mcgwa", "tie_embeddings": False},
}
FULL: dict[str, dict[str, Any]] = {
    "memory as context, bf16": {"pattern": "cc", "precision": "bf16"},
    **{f"block {letter}": {"pattern": 2 * letter} for letter in "mcgwa"},
    **{f"rule {rule}": {"pattern": "mm", "rule": rule} for rule in RULES},
    "memory tokens, no convolution": {"pattern": "cc", "memory_tokens": 2, "conv": 0},
    "channel gates, written rows": {"pattern": "mg", "gates": "channel", "gate_rank": 4, "write_persistent": True},
    "every block, bf16": {"pattern": "mcgwa", "precision": "bf16"},
}
GIVEN = [*BLOCKS, *(pytest.param(name, marks=pytest.mark.full) for name in FULL)]


def write_dtypes(folder: Path, run: Run, mesh: ParallelMesh) -> None:
    """bf16_dtypes.json: every weight's dtype in a training run of `run` in bf16."""
    model = build_model(replace(run, training=replace(run.training, precision="bf16")), mesh)
    dtypes = {to_hf(name): str(p.dtype) for name, p in model.named_parameters()}
    (folder / "bf16_dtypes.json").write_text(json.dumps(dtypes))


def ask_transformers(name: str, place: Path) -> dict[str, Any]:
    """What transformers said of model `name`: case -> value."""
    folder = place / "exported"
    run = small_run(vocab_size=VOCAB, pad_vocab_to=64, lr_max=CALM, **(BLOCKS | FULL)[name])
    with ParallelMesh(device="cpu") as mesh:
        exported_model(folder, run, mesh)
        write_dtypes(folder, run, mesh)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    alone = {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(place / "modules"), "OMP_NUM_THREADS": "1"}
    words = [PYTHON, "-I", "-W", "ignore", str(CASES), str(folder)]
    done = subprocess.run(words, env=kept | alone, cwd=place, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout.rpartition("RESULT ")[2])
    return said


TEXTS = {
    *(
        "greedy cached",
        "generated from embeddings",
        "prompt in parts",
        "beam cached",
        "ending beams cached",
        "sampling cached",
        "second turn",
        "from a file",
    ),
    *(f"text padded {side}{parts}" for side in ("left", "both", "right") for parts in ("", " in parts")),
    *(f"second turn after the end, pad {pad}" for pad in ("apart", "ends")),
}
"""Cases that compare chosen tokens: in bf16 two tokens may be as likely but for rounding."""


def bound(name: str, case: str) -> float:
    """What rounding may do: sums in another order. bf16 activations are rounded to 8 bits on the way.

    Of a bf16 model transformers rounds all that it keeps on disk, memory weights too.
    """
    if case == "bf16 is near" or ("bf16" in name and case == "device map"):
        return 0.1
    return 0.02 if "bf16" in name else 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", GIVEN)
def test_transformers_does_as_training(tmp_path: Path, name: str) -> None:
    """Logits, generation however it is asked for, padding, caches, a Trainer's gradients, saving: all of them."""
    said = ask_transformers(name, tmp_path)
    rounded = TEXTS if "bf16" in name else set()
    wrong = {
        case: value
        for case, value in said.items()
        if (case not in rounded and value is not True if isinstance(value, bool) else not value <= bound(name, case))
    }
    assert said.keys() >= TEXTS and not wrong, wrong
