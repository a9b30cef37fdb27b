"""If these fail, a file in configs/runs can't be started."""

from __future__ import annotations

from pathlib import Path

import pytest

from miras_megatron.config.check import find_problems, find_warnings
from miras_megatron.config.load import load_run
from miras_megatron.config.sizes import sizes_of
from miras_megatron.layers import BlockSpec
from miras_megatron.model.build import block_spec

RUNS = sorted((Path(__file__).resolve().parents[2] / "configs/runs").glob("*.yaml"))

KNOWN_WARNING = {"quickstart": "memory.lr_max"}
"""It writes a fact with one step, above the bound for the worst chunk; its gates learn to spare the rest."""

PAPER_SIZES = {"170m": (12, 768, 16, 3e-3), "340m": (24, 1024, 16, 1.5e-3), "760m": (24, 1536, 16, 1.25e-3)}
PAPER_SIZES |= {"1b3": (18, 2048, 8, 7e-4)}

LONG_ROWS = {"_32k": 2**15, "_128k": 2**17, "_2m": 2**21}
"""Endings of runs on rows beyond the papers' 4,096 tokens."""


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_run_is_valid_and_can_be_sized(path: Path) -> None:
    """The first thing a newcomer does is start one of these."""
    run = load_run([str(path)])
    for world_size in (run.parallel.model_ranks, 8 * run.parallel.model_ranks):
        if world_size == run.parallel.model_ranks or run.training.global_batch >= 32:
            assert list(find_problems(run, world_size)) == []
    known = KNOWN_WARNING.get(path.stem, "-")
    assert [warning for warning in find_warnings(run) if not warning.startswith(known)] == []
    assert sizes_of(run, vocab_size=256).parameters > 0
    assert isinstance(block_spec(run), BlockSpec)
    assert run.run.dir == f"runs/{path.stem}", "two runs in one folder overwrite each other"


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_runs_named_after_a_paper_have_its_sizes(path: Path) -> None:
    """Rules 1.7 and 2.7: blocks, width, heads, learning rate, half a million tokens a batch but for long rows."""
    size = next((s for s in PAPER_SIZES if f"_{s}" in path.stem), None)
    run = load_run([str(path)])
    if size is None:
        assert path.stem in ("debug_cpu", "quickstart", "long_2m_cpu")
        return
    assert (run.model.layers, run.model.hidden, run.model.heads, run.optimizer.lr) == PAPER_SIZES[size]
    long = next((tokens for name, tokens in LONG_ROWS.items() if path.stem.endswith(name)), 4096)
    assert run.data.sequence_length == long
    # long rows: as many as 512 ranks need, of which eight share one
    assert run.tokens_per_step == (2**19 if long == 4096 else 64 * long)
    assert run.training.steps * run.tokens_per_step == pytest.approx(
        {"170m": 15e9, "340m": 15e9, "760m": 30e9, "1b3": 100e9}[size], rel=1e-3
    )
