"""If this failed, a model that was trained on many machines couldn't be exported on the one that it is used on."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from miras_tools.hf_shapes import weight_shapes
from miras_tools.run_writer import write_run
from torch import Tensor

from miras_megatron.config.load import load_run
from miras_megatron.config.schema import Run
from miras_megatron.training.tokenizer import ByteTokenizer

CONFIG = Path(__file__).resolve().parents[2] / "configs/runs/titans_lmm_1b3.yaml"

ALLOWED = 512 << 20
"""bytes beyond the largest tensor, imports among them"""

EXPORT = """
import resource, sys
from miras_tools.to_hf import main
code = main([sys.argv[1], sys.argv[2], "--no-check"])
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
sys.exit(code)
"""


def random_weights(run: Run) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for name, shape in weight_shapes(run).items():
        yield name, torch.empty(shape).uniform_(-0.02, 0.02, generator=generator)


def write_checkpoint(run: Run) -> None:
    """A run with a checkpoint of step 0 with random weights, a tensor at a time."""
    common = {"step": 0, "tokens": 0, "updates": 0, "tokenizer": ByteTokenizer().digest, "data": {}}
    write_run(Path(run.run.dir), run, common, random_weights(run))


@pytest.mark.full
@pytest.mark.slow
def test_a_model_of_1_3_billion_parameters_is_exported_in_little_memory(tmp_path: Path) -> None:
    """1.3B weights are 4.5 GB in float32; the export holds one tensor at a time and says how far it is."""
    changes = ["--data.tokenizer=bytes", "--model.vocab_size=31997", "--training.precision=fp32"]
    run = load_run([str(CONFIG), *changes, f"--run.dir={tmp_path / 'run'}"])
    sizes = [4 * math.prod(shape) for shape in weight_shapes(run).values()]
    if shutil.disk_usage(tmp_path).free < 3 * sum(sizes):
        pytest.skip(
            f"needs {3 * sum(sizes) >> 30} GiB of disk: a smaller one it would fill, and tell nothing of memory"
        )
    write_checkpoint(run)
    words = [sys.executable, "-W", "ignore", "-c", EXPORT, str(tmp_path / "run"), str(tmp_path / "model")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("wrote tensor") >= 2 and f"wrote tensor {len(sizes)} of {len(sizes)}" in done.stderr
    peak = int(done.stdout.split("peak")[1])
    print(f"peak {peak >> 20} MiB, largest tensor {max(sizes) >> 20} MiB")
    assert peak <= max(sizes) + ALLOWED
    shutil.rmtree(tmp_path / "run")
    shutil.rmtree(tmp_path / "model")
