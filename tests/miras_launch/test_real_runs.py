"""If these fail, a run that is meant for a cluster is refused there, or doesn't fit into its devices."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from miras_launch.main import main

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
LONG_RUNS = ("titans_mac_340m_32k", "yaad_760m_128k", "titans_lmm_1b3_2m")
CLUSTERS = {"slurm_1x8": 1, "slurm_8x8": 8, "slurm_64x8": 64}


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("name", LONG_RUNS)
def test_every_long_run_fits_one_eight_and_sixty_four_nodes(
    name: str, cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dry run prints a script for so many nodes, and memory a rank that leaves half of 80 GiB to activations."""
    assert main([str(CONFIGS / f"runs/{name}.yaml"), f"--cluster={cluster}", "--dry-run"]) == 0
    told = capsys.readouterr().out
    nodes = CLUSTERS[cluster]
    assert told.startswith(f"{8 * nodes} ranks = {nodes} data x 1 tensor x 1 pipeline x 8 context; 64 rows a step")
    (need,) = re.findall(r"memory a rank: at least ([\d.]+) GiB", told)
    assert 1 < float(need) < 40
    assert f"#SBATCH --nodes={nodes}\n#SBATCH --ntasks-per-node=8\n#SBATCH --gpus-per-node=8" in told
    assert 'miras-train "$run_dir/launch/$config"' in told and f" run_dir=runs/{name} " in told


def test_two_million_tokens_are_shared_without_truncation(capsys: pytest.CaptureFixture[str]) -> None:
    """2,097,152 tokens of a row, 8 ranks, 32 pieces each: 8,192 tokens of activations at a time."""
    words = ["--parallel.context=64", "--parallel.pieces=4", "--training.global_batch=8"]
    run = str(CONFIGS / "runs/titans_lmm_1b3_2m.yaml")
    assert main([run, "--cluster=slurm_64x8", "--dry-run", *words]) == 0
    assert "512 ranks = 8 data x 1 tensor x 1 pipeline x 64 context; 8 rows a step" in capsys.readouterr().out


def test_a_run_that_does_not_fit_a_device_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before a thousand devices find it out."""
    text = (CONFIGS / "clusters/slurm_1x8.yaml").read_text().replace("gpu_gib: 80", "gpu_gib: 16")
    (tmp_path / "small.yaml").write_text(text)
    run = str(CONFIGS / "runs/titans_lmm_1b3_2m.yaml")
    assert main([run, f"--cluster={tmp_path / 'small.yaml'}", "--dry-run"]) == 0
    assert "note: that is more than the 16 GiB of a device (gpu_gib); share the model" in capsys.readouterr().out
