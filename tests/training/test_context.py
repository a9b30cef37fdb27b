"""Runs whose rows are shared by ranks learn what one rank learns, and a lost rank ends them with a name."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_run import learned, records, tiny_config, train_here
from helpers.worlds import run_world

from miras_megatron.training.main import main

LAYOUTS: dict[str, dict[str, Any]] = {
    "context": {"parallel__context": 2},
    "pieces and forwards ahead": {
        "parallel__context": 2,
        "parallel__pieces": 3,
        "parallel__forwards_ahead": 1,
        "training__micro_batch": 1,
    },
    "pipeline": {"parallel__context": 2, "parallel__pipeline": 2, "parallel__pieces": 2, "training__micro_batch": 1},
    "tensor and sequence": {"parallel__context": 2, "parallel__tensor": 2, "parallel__sequence": "true"},
    "data": {"parallel__context": 2, "training__micro_batch": 1},
    "heads": {"parallel__context": 2, "parallel__carry": "heads"},
}
GIVEN = [
    pytest.param(name, marks=[pytest.mark.full] * (name in ("pipeline", "tensor and sequence"))) for name in LAYOUTS
]
RANKS = {"pipeline": 4, "tensor and sequence": 4, "data": 4}


def train_on(ranks: int, argv: list[str]) -> None:
    """The same run on so many ranks."""
    assert run_world(ranks, train_here, argv) == [0] * ranks


def check_alike(run: Path, one: Path, rel: float) -> None:
    """Losses and gradient norms, step by step."""
    pairs = list(zip(learned(run), learned(one), strict=True))
    assert pairs
    for (step, loss, norm), (_, one_loss, one_norm) in pairs:
        assert loss == pytest.approx(one_loss, rel=rel), f"step {step}"
        assert norm == pytest.approx(one_norm, rel=10 * rel), f"step {step}"


@pytest.mark.parametrize("name", GIVEN)
def test_ranks_that_share_rows_learn_what_one_rank_does(tmp_path: Path, name: str) -> None:
    """The whole way: data cut, loss counted, gradients reduced, validation by position. float32, four steps."""
    same = {"training__steps": 4, "evaluate__every": 2, "checkpoint__every": 0}
    assert main(tiny_config(tmp_path, "one", **same)) == 0
    ranks = RANKS.get(name, 2)
    train_on(ranks, tiny_config(tmp_path, "many", **same, **LAYOUTS[name]))
    check_alike(tmp_path / "many", tmp_path / "one", rel=1e-5)
    for here, there in zip(
        records(tmp_path / "many", "validation.jsonl"), records(tmp_path / "one", "validation.jsonl"), strict=True
    ):
        assert here["by_position"] == pytest.approx(there["by_position"], rel=1e-4)
        assert here["tokens"] == there["tokens"]
    for record in records(tmp_path / "many"):
        assert len(record["idle"]) == ranks and all(0 <= share < 1 for share in record["idle"])


@pytest.mark.parametrize(
    ("saved", "ranks", "loaded", "more"),
    [("context", 2, {}, 1), ("pipeline", 4, LAYOUTS["context"], 2), ("tensor and sequence", 4, LAYOUTS["pipeline"], 4)],
)
def test_a_checkpoint_goes_on_under_another_layout(
    tmp_path: Path, saved: str, ranks: int, loaded: dict[str, Any], more: int
) -> None:
    """Queues give other machines the next day: weights, moments and data position are layout-free."""
    assert main(tiny_config(tmp_path, "one", training__steps=4)) == 0
    train_on(ranks, tiny_config(tmp_path, "cut", training__steps=2, optimizer__decay_steps=4, **LAYOUTS[saved]))
    argv = tiny_config(tmp_path, "cut", training__steps=4, **loaded)
    assert main(argv) == 0 if more == 1 else train_on(more, argv) is None
    check_alike(tmp_path / "cut", tmp_path / "one", rel=1e-5)


def test_a_step_can_be_traced(tmp_path: Path) -> None:
    """Who waits for whom is seen, not guessed: pieces, scans and waits of both ranks."""
    changes = {"training__steps": 2, "checkpoint__every": 0, "parallel__context": 2, "parallel__pieces": 2}
    train_on(2, tiny_config(tmp_path, "run", **changes, logging__trace_step=2))
    trace = json.loads((tmp_path / "run" / "trace_step_2.json").read_text())
    names = [(event["pid"], event["name"]) for event in trace["traceEvents"] if event["ph"] == "X"]
    assert all((rank, f"forward {piece}") in names for rank, piece in ((0, 0), (0, 2), (1, 1), (1, 3)))
    assert all((rank, f"{what} {rank}") in names for rank in (0, 1) for what in ("replay", "backward"))
    assert (1, "wait for state") in names and (0, "wait for gradient") in names


@pytest.mark.parametrize(
    ("more", "ranks"),
    [
        ({"parallel__pieces": 3}, 1),
        ({"parallel__context": 2}, 2),
        ({"parallel__context": 2, "model__write_persistent": "true"}, 2),
    ],
)
def test_the_inner_loop_of_the_last_piece_is_what_one_rank_shows(
    tmp_path: Path, more: dict[str, Any], ranks: int
) -> None:
    """Probes look at the last chunk of a row, from the state that came there: no learned start, no replay, no mean
    over slices. Two ranks cut a row of 24 tokens in the middle of a chunk."""
    changes = {"training__steps": 1, "logging__memory_every": 1, "data__packing": "plain", "checkpoint__every": 0}
    changes |= {"training__global_batch": 1, "training__micro_batch": 1, "data__split": "100,0,0"}
    one = {name: value for name, value in more.items() if not name.startswith("parallel")}
    assert main(tiny_config(tmp_path, "one", **changes, **one)) == 0
    argv = tiny_config(tmp_path, "pieces", **changes, **more)
    assert main(argv) == 0 if ranks == 1 else train_on(ranks, argv) is None
    whole, pieces = (records(tmp_path / name)[0]["memory"] for name in ("one", "pieces"))
    assert whole.keys() == pieces.keys() and whole
    for layer, quantities in whole.items():
        assert pieces[layer] == pytest.approx(quantities, rel=1e-4), layer


LOST: dict[str, dict[str, Any]] = {
    "context": {"parallel__context": 3},
    "pipeline": {"parallel__pipeline": 3, "model__layers": 3},
}


def told_until(process: subprocess.Popen[str], said: str) -> str:
    """What a rank says on stderr, to the line that has `said`, or to its end."""
    assert process.stderr is not None
    lines: list[str] = []
    while not lines or (lines[-1] and said not in lines[-1]):
        lines.append(process.stderr.readline())
    return "".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "axis"),
    [
        (signal.SIGKILL, "context"),
        pytest.param(signal.SIGSTOP, "context", marks=pytest.mark.full),
        pytest.param(signal.SIGSTOP, "pipeline", marks=pytest.mark.full),
    ],
)
def test_a_rank_that_is_lost_ends_the_others_with_its_name(tmp_path: Path, how: signal.Signals, axis: str) -> None:
    """Else one dead node keeps all others waiting, and nobody knows which. Three ranks; the last is lost in a step."""
    changes = {"training__steps": 100_000, "checkpoint__every": 0, "parallel__timeout": 6, **LOST[axis]}
    argv = tiny_config(tmp_path, **changes)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in ("0", "1", "2"):
        here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, "-m", "miras_megatron.training.main", *argv]
        python = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        ranks.append(
            subprocess.Popen(
                command, env=os.environ | here | python, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
            )
        )
    too_late = threading.Timer(90, lambda: [process.kill() for process in ranks])
    try:
        metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
        while not (metrics.exists() and metrics.read_text().count("\n") > 3) and time.monotonic() < deadline:
            time.sleep(0.1)
        ranks[2].send_signal(how)
        too_late.start()
        errors = {}
        for rank in (1, 0):
            errors[rank] = told_until(ranks[rank], "asks all ranks who is gone")
            ranks[rank].send_signal(signal.SIGTERM)  # as torchrun does at once
        for rank, error in errors.items():
            error += told_until(ranks[rank], "nothing of the kind")
            ranks[rank].wait()
            assert ranks[rank].returncode == 4, error
            assert "Traceback" not in error
            assert f"rank {rank} " in error and "lost" in error
            assert "no answer from rank 2 (" in error, error
    finally:
        too_late.cancel()
        for process in ranks:
            process.kill()
            process.wait()
