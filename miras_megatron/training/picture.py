"""One picture of a quickstart: the loss while training, and how often a needle is found over growing lengths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def draw_quickstart(folder: Path, summary: dict[str, Any]) -> Path | None:
    """Write quickstart.png into `folder` from metrics.jsonl and the summary; None where matplotlib isn't there."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    loss, retrieval = figure.subplots(1, 2)
    _draw_loss(loss, folder)
    _draw_retrieval(retrieval, summary)
    target = folder / "quickstart.png"
    canvas.print_png(target)
    return target


def _draw_loss(axes: Any, folder: Path) -> None:
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    axes.plot([s["step"] for s in steps], [s["loss"] for s in steps], color="tab:blue", linewidth=0.8)
    axes.set(xlabel="step", ylabel="nats a byte, needles included", title="training loss")
    axes.grid(alpha=0.3)


def _draw_retrieval(axes: Any, summary: dict[str, Any]) -> None:
    length = summary["sequence_length"]
    for name, label, style in (
        ("needle_accuracy", "as trained", "o-"),
        ("needle_accuracy_zeroed", "memory reads zeroed", "s--"),
    ):
        scores = summary[name]
        axes.plot([int(factor) * length for factor in scores], list(scores.values()), style, label=label)
    axes.axhline(summary["chance"], color="grey", linestyle=":", label="guessing")
    axes.axvline(length, color="grey", linewidth=0.8)
    axes.annotate("training length", (length, 0.5), rotation=90, ha="right", va="center", fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="bytes of text", ylabel="share answered", ylim=(-0.03, 1.03), title="one needle")
    axes.legend(loc="best", fontsize=8)
    axes.grid(alpha=0.3)
