"""If this failed, an exported model would have scores in the field's evaluation harness that aren't its own."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path

import pytest
import torch
from helpers.hf_folders import VOCAB, exported_model
from helpers.models import small_run

from miras_megatron.parallel.mesh import ParallelMesh

TASK = """\
task: own_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""
TEXTS = ["It was a very fine morning.", "Emma knew nothing of the matter, and said so: \u201cindeed!\u201d", "x"]


@pytest.mark.slow
@pytest.mark.lm_eval
def test_the_harness_finds_the_bits_per_byte_of_training(tmp_path: Path) -> None:
    """Offline, on texts of one's own; every text from a fresh state, after the end of another document."""
    folder = tmp_path / "model"
    run = small_run("mcgw", vocab_size=VOCAB, pad_vocab_to=64)
    with ParallelMesh(device="cpu") as mesh:
        model = exported_model(folder, run, mesh)
        nats = sum(_nats(model, text) for text in TEXTS)
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    (tmp_path / "own_text.yaml").write_text(TASK.format(data=data), encoding="utf-8")
    wanted = nats / math.log(2) / sum(len(text.encode()) for text in TEXTS)
    assert _harness(tmp_path, folder) == pytest.approx(wanted, rel=1e-5)


@torch.no_grad()
def _nats(model: torch.nn.Module, text: str) -> float:
    ids = torch.tensor([[256, *text.encode()]])
    return float(torch.nn.functional.cross_entropy(model(ids)[0, :-1, :VOCAB].double(), ids[0, 1:], reduction="sum"))


def _harness(place: Path, folder: Path) -> float:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    alone = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(place / "hf"), "OMP_NUM_THREADS": "1"}
    words = ["-m", "lm_eval", "run", "--model", "hf", "--tasks", "own_text", "--include_path", str(place)]
    words += ["--model_args", f"pretrained={folder},trust_remote_code=True,max_length=512", "--device", "cpu"]
    words += ["--batch_size", "2", "--output_path", str(place / "out")]
    python = os.environ["MIRAS_LM_EVAL_PYTHON"]
    done = subprocess.run([python, *words], env=kept | alone, cwd=place, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = (place / "out").rglob("results*.json")
    return float(json.loads(found.read_text(encoding="utf-8"))["results"]["own_text"]["bits_per_byte,none"])
