"""If these failed, nobody could check our claims of speed, or a wrong scan would be reported as a fast one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from miras_tools import bench
from miras_tools.bench_cases import Case, operations, paired_cases, scan_cases
from miras_tools.bench_report import summarise, table

RESULT = {"seconds": 2.0, "cpu_seconds": 1.0, "peak_mib": 10.0, "rate": 1e11}


@pytest.mark.full
@pytest.mark.slow
def test_a_quick_run_without_the_peer_writes_the_documented_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command works on a machine that has nothing but this repository, and says what is missing."""
    monkeypatch.setattr(bench, "_peer_version", lambda: None)
    path = tmp_path / "bench.json"
    assert bench.main(["memory", "--quick", "--repeats", "1", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["format"] == 1 and report["peer"] is None and report["check"] <= 1e-9
    assert set(report["machine"]) == {"processor", "cores", "torch", "threads", "device"}
    (row,) = report["beside_peer"]
    assert row["peer"] is None and row["speed_ratio"] is None and row["ours"]["tokens_per_s"] > 0
    assert [scan["rule"] for scan in report["scans"]] == ["titans", "deltanet"]
    assert report["scans"][0]["share"] > 0 and report["scans"][1]["share"] is None
    printed = capsys.readouterr().out
    assert bench.INSTALL in printed and "| 2 x 16 |" in printed


def test_no_speed_is_reported_when_the_fast_scan_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fast wrong answer is worth nothing; not a number counts as wrong."""
    for error in (1e-6, float("nan")):
        monkeypatch.setattr(bench, "_measure", lambda job, threads, error=error: {"largest_error": error})
        assert bench.main(["memory", "--quick"]) == 1
        captured = capsys.readouterr()
        assert "no speed is reported" in captured.err and "tokens/s" not in captured.out


def test_ratios_are_medians_of_rounds() -> None:
    """One disturbed round moves nothing: speed is the peer's seconds over ours, memory ours over the peer's."""
    ours = Case("layer", "titans", 4, 64, 4096)
    peer = Case("peer", "titans", 4, 64, 4096)
    rounds = [{**RESULT, "seconds": 9.0, "peak_mib": 90.0}, RESULT, RESULT]
    others = [{**RESULT, "seconds": 8.0, "peak_mib": 100.0}] * 3
    report = summarise([(ours, rounds), (peer, others)], 1, "0.5.5", 0.0)
    (row,) = report["beside_peer"]
    assert row["speed_ratio"] == 4.0 and row["cpu_speed_ratio"] == 1.0 and row["memory_ratio"] == 0.1
    assert "| 4 x 64 | 2,048 | 512 | 4.0 | 1.0 | 10 | 100 | 0.100 |" in table(report)


def test_products_are_counted_as_documented() -> None:
    """The share of the machine's rate rests on this count: 43 products of 2 D H and 16 masked ones of c (D + H)."""
    assert operations(2, True, 64, 64) == 43 * 2 * 64 * 256 + 16 * 64 * (64 + 256)
    assert operations(2, True, 64, 256) == operations(2, True, 64, 64)
    assert operations(1, False, 8, 4) == (3 + 3 + 4 + 2 - 1) * 2 * 64 + 8 * 4 * 16


def test_every_shape_is_measured_on_both_sides_in_turn() -> None:
    """Figures of two runs on a machine that others use can't be compared."""
    assert [case.side for case in paired_cases(False)] == ["layer", "peer"] * 2
    assert {case.chunk_size for case in scan_cases(False)} == {16, 64, 256}


@pytest.mark.parametrize("arguments", [["memory", "--repeats", "0"], ["memory", "--threads", "two"], ["nothing"], []])
def test_wrong_arguments_end_with_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A typing error must not start minutes of measuring."""
    with pytest.raises(SystemExit) as stop:
        bench.main(arguments)
    assert stop.value.code == 2


def test_a_json_file_in_no_folder_is_refused_first(tmp_path: Path) -> None:
    """Minutes of measuring would be lost at the end."""
    assert bench.main(["memory", "--json", str(tmp_path / "none" / "x.json")]) == 2
