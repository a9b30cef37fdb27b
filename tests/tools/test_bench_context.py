"""If these failed, the efficiency of shared sequences and the memory of long ones would be claims nobody can check."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from miras_tools import bench, bench_context, bench_long
from miras_tools.bench_context import ContextCase, context_cases, context_table
from miras_tools.bench_trace import calibrate, idle_of_trace, packet_sizes, simulated_idle

from miras_megatron.config.load import load_run
from miras_megatron.config.sizes import BATCH_BYTES, LOSS_BYTES, borders_bytes, row_bytes, state_bytes
from miras_megatron.parallel.simulation import LayerCosts, Parts

LONG = str(Path(__file__).resolve().parents[2] / "configs/runs/long_2m_cpu.yaml")


@pytest.mark.full
@pytest.mark.slow
def test_a_quick_comparison_runs_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command works on any machine, agrees with one rank, and writes what it says."""
    path = tmp_path / "context.json"
    arguments = ["context", "--quick", "--layers", "2", "--repeats", "1", "--carry", "relay", "--json", str(path)]
    assert bench.main(arguments) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["carry"] == "relay" and row["tokens"] == 512 and row["loss_difference"] < 1e-4
    assert row["speed_up"] == pytest.approx(row["whole_seconds"] / row["shared_seconds"])
    assert "| relay | titans | 512 |" in capsys.readouterr().out


def test_nothing_is_reported_where_losses_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast wrong answer is worth nothing; not a number counts as wrong."""
    both, whole, half = (Asked(loss) for loss in (5.0, 5.1, 5.0))
    with pytest.raises(ValueError, match="losses of one rank and of 2 are"):
        bench_context._round(1, both, whole, [half, half], False)  # type: ignore[arg-type, list-item]
    with pytest.raises(ValueError, match="no speed is reported"):
        bench_context._round(1, Asked(float("nan")), whole, [half], False)  # type: ignore[arg-type, list-item]


class Asked:
    """Ranks that answer at once."""

    def __init__(self, loss: float) -> None:
        self.loss = loss

    def ask(self, task: str, **options: Any) -> None:
        """As Ranks.ask."""

    def answers(self) -> list[dict[str, float]]:
        """As Ranks.answers."""
        return [{"loss": self.loss, "seconds": 1.0}]


def test_ratios_are_medians_of_rounds() -> None:
    """One disturbed round moves nothing, and the pair is compared within its round."""
    case = ContextCase("heads", "titans", 100)
    rounds = [timed(4.0, 2.0, 2.0), timed(8.0, 4.0, 8.0), timed(4.0, 2.0, 2.5)]
    layout = {"pieces": 1, "head_groups": 1, "reason": "none"}
    row = bench_context._row(case, layout, rounds, traced=False)
    assert (row["speed_up"], row["allowed"], row["of_allowed"]) == (1.6, 2.0, 0.8)
    assert row["idle_traced"] is None and "| 1.60 | 0.800 | - | - | - |" in context_table([row])


def timed(*seconds: float) -> dict[str, Any]:
    """A round of one rank, the pair, the shared sequence."""
    return {name: [{"seconds": s, "loss": 1.0}] for name, s in zip(("whole", "pair", "shared"), seconds, strict=True)}


def test_what_waits_and_who_ends_early_is_idle() -> None:
    """Two ranks over ten seconds: one waits a second inside its piece, the other is done two seconds early."""
    first = [event("piece", 0, 10), event("wait", 3, 1), event("scan", 4, 2)]
    second = [event("piece", 1, 3), event("piece", 4, 4)]
    assert idle_of_trace([first, second]) == pytest.approx((0.1 + 0.2) / 2)


def event(kind: str, start: float, seconds: float, name: str = "") -> dict[str, Any]:
    """As the recorder has them, in microseconds."""
    return {"cat": kind, "name": name, "ts": 1e6 * start, "dur": 1e6 * seconds}


def test_costs_are_read_off_the_hand_overs_of_one_rank() -> None:
    """Two layers, scans of 2 forward and 3 backward, 1 before and 2 after each; every number comes back."""
    marks, events = list[Any](), list[Any]()
    for piece in range(4):
        start = 100.0 * piece
        events += [event("piece", start, 10, f"forward {piece}"), event("piece", start + 50, 14, f"backward {piece}")]
        for layer, begin in ((1, start + 1), (2, start + 6)):
            marks.append([1e6 * begin, "receive", "right", 1, piece, layer, 2, 900])
            marks.append([1e6 * (begin + 2), "send", "right", 1, piece + 1, layer, 2, 900])
            marks.append([1e6 * (begin - 0.5), "receive", "right", 1, piece, layer, 0, 30])
            marks.append([1e6 * (begin - 0.7), "send", "right", 1, piece + 1, layer, 0, 30])
        for layer, begin in ((2, start + 53), (1, start + 60)):
            marks.append([1e6 * begin, "receive", "left", 1, piece + 1, layer, 2, 900])
            marks.append([1e6 * (begin + 3), "send", "left", 1, piece, layer, 2, 900])
    answer = {"marks": marks, "events": events}
    assert packet_sizes(answer) == [30, 900]
    costs = calibrate(answer, layers=2, pieces=4)
    assert costs.forward == pytest.approx(Parts(1, 2, 2).scaled(2))
    assert costs.backward == pytest.approx(Parts(1, 3, 3).scaled(2))
    assert (
        0.0
        < simulated_idle(costs, 2, 2, 2)
        < simulated_idle(costs, 2, 2, 2, 0.5)
        < simulated_idle(costs, 2, 2, 1)
        < 1.0
    )
    assert simulated_idle(LayerCosts(Parts(1, 0, 1), Parts(1, 0, 1)), 2, 2, 1) == pytest.approx(0.0)


def test_a_row_costs_what_its_tokens_and_borders_take() -> None:
    """The formula that measured peaks are held against."""
    run = load_run([LONG])
    assert row_bytes(run) == 2097152 * (BATCH_BYTES + LOSS_BYTES)
    assert borders_bytes(run) == 254 * state_bytes(run)
    two = replace(run, parallel=replace(run.parallel, context=2, pieces=128))
    assert row_bytes(two) == 2097152 * BATCH_BYTES + 1048576 * (BATCH_BYTES + LOSS_BYTES)
    assert borders_bytes(two) == 127 * state_bytes(run)
    base = {"peak_mib": 900.0, "start_mib": 400.0, "row_mib": 1.0, "borders_mib": 0.0}
    row = {"peak_mib": 1100.0, "row_mib": 61.0, "borders_mib": 40.0}
    found = bench_long._reckoned(base, row)
    assert found == {"activations_mib": 499.0, "reckoned_mib": 1000.0, "ratio": 1.1}


def test_rows_of_other_lengths_keep_the_length_of_pieces(tmp_path: Path) -> None:
    """Speed and one piece's activations are compared, so the pieces must be alike."""
    runs = bench_long.runs_of(LONG, [16384, 262144], str(tmp_path))
    assert [run.parallel.pieces for run in runs] == [2, 32]
    with pytest.raises(ValueError, match="10000 tokens are no multiple of 1 pieces of 8192"):
        bench_long.runs_of(LONG, [10000], str(tmp_path))


@pytest.mark.slow
def test_gradients_in_pieces_are_checked_on_the_run_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """The measured step is the exact one."""
    assert bench.main(["long", "--run", LONG, "--check", "--tokens", "1000"]) == 0
    assert "1000 tokens in 8 pieces" in capsys.readouterr().out


def test_wrong_arguments_end_with_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A typing error must not start minutes of measuring."""
    assert bench.main(["long", "--run", str(tmp_path / "none.yaml")]) == 2
    for arguments in (["context", "--tokens", "0"], ["context", "--carry", "train"], ["long", "--tokens"]):
        with pytest.raises(SystemExit) as stop:
            bench.main(arguments)
        assert stop.value.code == 2


def test_every_way_of_sharing_that_fits_has_a_row() -> None:
    """A carry that nobody measures decays."""
    assert [case.carry for case in context_cases(65536, 4, 64)] == list(bench.CARRIES)
