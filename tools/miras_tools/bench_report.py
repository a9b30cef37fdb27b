"""The table and the JSON of miras-bench.

{"format": 1,
 "machine": {"processor", "cores", "torch", "threads", "device": "cpu"},
 "check": largest relative difference of the fast scan from the oracle,
 "peer": "titans-pytorch 0.5.5" or null,
 "beside_peer": [{"heads", "head_dim", "tokens", "chunk_size", "ours": SIDE, "peer": SIDE or null,
                  "speed_ratio", "cpu_speed_ratio", "memory_ratio"}],     ours / peer, medians of each round's ratio
 "scans": [{"rule", "options", "heads", "head_dim", "tokens", "chunk_size", "tokens_per_s", "cpu_tokens_per_s",
            "peak_mib", "products_gflop", "rate_gflops", "share"}]}       share of the rate; null where not counted
SIDE: {"tokens_per_s", "cpu_tokens_per_s", "peak_mib"}; medians over the rounds, peak above import.
"""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from .bench_cases import Case, operations

Found = list[tuple[Case, list[dict[str, Any]]]]

NOTES = """Forward plus backward, batch 1, float32; peak memory is above import, each side in a process of its own.
Beside the peer both sides are layers: norm, q, k, v, gates, memory, a gate a head, output projection. Ours has gates
of every token and matrix and reads every token with the memory that token left; titans-pytorch pools its gates over a
chunk and reads with the memory of the chunk before. Both take gradients at the weights of each chunk's start.
Share: counted products (no gates, norms, activations) a second of CPU time, over the rate of this machine's batched
matrix product of the tile's shape, measured in the same processes."""


def summarise(found: Found, threads: int, peer: str | None, error: float) -> dict[str, Any]:
    """The report as plain data."""
    peers = {_shape(case): results for case, results in found if case.side == "peer"}
    layers = [(case, results) for case, results in found if case.side == "layer"]
    return {
        "format": 1,
        "machine": machine(threads),
        "check": error,
        "peer": peer and f"titans-pytorch {peer}",
        "beside_peer": [_paired(case, results, peers.get(_shape(case))) for case, results in layers],
        "scans": [_scan(case, results) for case, results in found if case.side == "scan"],
    }


def machine(threads: int) -> dict[str, Any]:
    """What the figures were taken on."""
    described = {"processor": _processor(), "cores": os.cpu_count(), "torch": metadata.version("torch")}
    return {**described, "threads": threads, "device": "cpu"}


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "")
    name = names[0] if names else platform.processor() or platform.machine()
    return name + (" with AVX-512" if " avx512f" in flags else "")


def _shape(case: Case) -> tuple[int, int, int, int]:
    return case.heads, case.head_dim, case.tokens, case.chunk_size


def _described(case: Case) -> dict[str, Any]:
    return dict(zip(("heads", "head_dim", "tokens", "chunk_size"), _shape(case), strict=True))


def _side(case: Case, results: list[dict[str, Any]]) -> dict[str, float]:
    return {
        "tokens_per_s": case.tokens / median(one["seconds"] for one in results),
        "cpu_tokens_per_s": case.tokens / median(one["cpu_seconds"] for one in results),
        "peak_mib": median(one["peak_mib"] for one in results),
    }


def _paired(case: Case, ours: list[dict[str, Any]], peer: list[dict[str, Any]] | None) -> dict[str, Any]:
    row: dict[str, Any] = {**_described(case), "ours": _side(case, ours), "peer": peer and _side(case, peer)}
    # faster is fewer seconds: the peer's over ours
    for name, over in (("speed_ratio", "seconds"), ("cpu_speed_ratio", "cpu_seconds")):
        row[name] = peer and median(b[over] / a[over] for a, b in zip(ours, peer, strict=True))
    row["memory_ratio"] = peer and median(a["peak_mib"] / b["peak_mib"] for a, b in zip(ours, peer, strict=True))
    return row


def _scan(case: Case, results: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"rule": case.rule, "options": case.options, **_described(case), **_side(case, results)}
    row["rate_gflops"] = median(one["rate"] for one in results) / 1e9
    row["products_gflop"] = row["share"] = None
    if case.counted:
        depth, momentum = case.options.get("depth", 2), case.rule == "titans"
        count = operations(depth, momentum, case.head_dim, case.chunk_size) * case.heads * case.tokens
        row["products_gflop"] = count / 1e9
        row["share"] = median(count / one["cpu_seconds"] / one["rate"] for one in results)
    return row


def table(report: dict[str, Any]) -> str:
    """The report in Markdown, as docs/performance.md holds it."""
    where = report["machine"]
    title = f"{where['cores']} cores of an {where['processor']}, no GPU, torch {where['torch']}"
    lines = [f"{title}; {where['threads']} thread(s)", ""]
    lines += ["| heads x width | tokens/s ours | peer | ratio | CPU-time ratio | peak MiB ours | peer | ratio |"]
    lines += ["| --- " * 8 + "|", *(_paired_line(row) for row in report["beside_peer"]), ""]
    lines += ["| scan alone | heads x width | chunk | tokens/s | peak MiB | GFLOP | GFLOP/s of a product | share |"]
    lines += ["| --- " * 8 + "|", *(_scan_line(row) for row in report["scans"]), "", NOTES]
    return "\n".join(lines)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _paired_line(row: dict[str, Any]) -> str:
    ours, peer = row["ours"], row["peer"] or {"tokens_per_s": None, "peak_mib": None}
    cells = [f"{row['heads']} x {row['head_dim']}", _number(ours["tokens_per_s"], ",.0f")]
    cells += [_number(peer["tokens_per_s"], ",.0f"), _number(row["speed_ratio"], ".1f")]
    cells += [_number(row["cpu_speed_ratio"], ".1f"), _number(ours["peak_mib"], ",.0f")]
    return _line([*cells, _number(peer["peak_mib"], ",.0f"), _number(row["memory_ratio"], ".3f")])


def _scan_line(row: dict[str, Any]) -> str:
    options = "".join(f", {name} {value}" for name, value in row["options"].items())
    cells = [row["rule"] + options, f"{row['heads']} x {row['head_dim']}", str(row["chunk_size"])]
    cells += [_number(row["tokens_per_s"], ",.0f"), _number(row["peak_mib"], ",.0f")]
    cells += [_number(row["products_gflop"], ".1f"), _number(row["rate_gflops"], ".0f")]
    return _line([*cells, _number(row["share"], ".2f")])
