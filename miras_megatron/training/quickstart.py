"""What `make run` does: train a small Titans-MAC on the shipped text with planted needles, then show what it learned.

It trains on two ranks that share every row, after one rank alone has taken the first steps to compare.

    python -m miras_megatron.training.quickstart [CONFIG] [--section.field=value ..]

Everything lies in run.dir: the run itself, summary.json (the figures and the text
that are printed) and quickstart.png (loss and retrieval). A second call
goes on from the checkpoint, so it only shows again.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config.load import parse_command_line
from ..config.schema import Run
from .atomic_write import write_atomically
from .baselines import gzip_bits_per_byte, held_out_text, stream_bits_per_byte, unigram_bits_per_byte
from .checkpoint_folder import latest_checkpoint, name_of
from .generate import open_model, stream_tokens
from .local_ranks import train_on_local_ranks
from .main import complain
from .needles import NeedleScore, score_lengths
from .picture import draw_quickstart
from .session import Session
from .tokenizer import ByteTokenizer

CONFIG = "configs/runs/quickstart.yaml"
PROMPT = "It was a very fine morning, and "
SAMPLE_BYTES = 240


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 0 when trained and shown, 2 for something to mend, 3 when stopped by the number guard."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0].startswith("--"):
        words = [CONFIG, *words]
    torch.set_num_threads(max(torch.get_num_threads(), min(os.cpu_count() or 1, 2)))
    try:
        command = parse_command_line(words, prog="quickstart", description=__doc__ or "", switches={})
        began = time.perf_counter()
        code = train_on_local_ranks(command.run, command.source)
        if code == 0 and is_trained(command.run):
            show(command.run, time.perf_counter() - began)
        return code
    except (ValueError, TimeoutError) as error:
        return complain(error, 0)


def is_trained(run: Run) -> bool:
    """Whether the run is at its last step; a signal may have stopped it before, to go on at the next call."""
    last = latest_checkpoint(run.run.dir)
    return last is not None and last.name >= name_of(run.training.steps)


def show(run: Run, seconds: float) -> None:
    """Measure the trained model, print it, and write summary.json and the picture. `seconds`: training's wall time."""
    folder = Path(run.run.dir)
    print("\nmeasuring: text it hasn't seen, and needles over growing lengths (minutes) ..", flush=True)
    with open_model(folder) as opened:
        summary = measure(opened.model, run) | pace(folder) | {"train_seconds": round(seconds, 1)}
        sample = write_sample(opened.model, summary)
    write_atomically(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    picture = draw_quickstart(folder, summary)
    print("\n" + "\n".join(report(summary)) + f"\n\n{sample}\n\n{places(folder, picture)}", flush=True)


def measure(model: nn.Module, run: Run) -> dict[str, Any]:
    """All figures of the summary that come from the model and the text."""
    seen, unseen = held_out_text(run, "train"), held_out_text(run, "validation")
    factors = run.evaluate.needle_lengths
    bits = stream_bits_per_byte(model, unseen)
    print(f"  unseen text: {bits:.3f} bits per byte", flush=True)
    scores = ask(model, run, unseen, factors)
    zeroed = ask(model, run, unseen, [factor for factor in factors if factor <= 16], zero_reads=True)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "bits_per_byte": bits,
        "unigram_bits_per_byte": unigram_bits_per_byte(seen, unseen),
        "gzip_bits_per_byte": gzip_bits_per_byte(unseen),
        "sequence_length": run.data.sequence_length,
        "attention_segment": run.model.segment,
        "needle_accuracy": {str(factor): score.accuracy for factor, score in scores.items()},
        "needle_accuracy_zeroed": {str(factor): score.accuracy for factor, score in zeroed.items()},
        "needle_samples": run.evaluate.needle_samples,
        "chance": next(iter(scores.values())).chance,
        "needles": [_plain(score) for score in scores.values()],
    }


def ask(
    model: nn.Module, run: Run, text: Tensor, factors: list[int], *, zero_reads: bool = False
) -> dict[int, NeedleScore]:
    """The score of each length, told as soon as it is there: together they take minutes."""
    scores: dict[int, NeedleScore] = {}
    for factor in factors:
        samples = run.evaluate.needle_samples
        scores |= score_lengths(model, run, text, [factor], samples=samples, zero_reads=zero_reads)
        reads = ", memory reads zeroed" if zero_reads else ""
        print(f"  needles at {factor}x training length{reads}: {scores[factor].accuracy:.1%} answered", flush=True)
    return scores


def _plain(score: NeedleScore) -> dict[str, Any]:
    return asdict(score)


def pace(folder: Path) -> dict[str, Any]:
    """The run's tokens, and tokens a second over all its steps."""
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    tokens = sum(step["tokens"] for step in steps)
    return {"tokens": tokens, "tokens_per_s": tokens / sum(step["seconds"] for step in steps)}


def write_sample(model: nn.Module, summary: dict[str, Any]) -> str:
    """Text that goes on from a prompt; puts it and the bytes of the stream's state into the summary."""
    tokenizer, session = ByteTokenizer(), Session()
    ids = stream_tokens(
        model,
        session,
        tokenizer.encode(PROMPT),
        max_new=SAMPLE_BYTES,
        eod=tokenizer.eod,
        temperature=0.7,
        generator=torch.Generator().manual_seed(0),
        vocab_size=tokenizer.vocab_size,
    )
    text = PROMPT + tokenizer.decode(ids)
    summary |= {"state_bytes": session.state_bytes, "text": text}
    return "It writes:\n  " + text.replace("\n", "\n  ")


def report(summary: dict[str, Any]) -> list[str]:
    """The lines of the table."""
    length, chance = summary["sequence_length"], summary["chance"]
    lines = [
        f"{summary['parameters']:,} parameters, {summary['tokens']:,} bytes read at {summary['tokens_per_s']:,.0f} a "
        f"second on {torch.get_num_threads()} thread(s) of this machine",
        f"unseen text: {summary['bits_per_byte']:.3f} bits per byte (gzip {summary['gzip_bits_per_byte']:.3f}, "
        f"byte frequencies {summary['unigram_bits_per_byte']:.3f})",
        "",
        f"One fact such as @Q7 somewhere in the text, asked at its end. Trained on rows of {length} bytes; attention",
        f"sees {summary['attention_segment']}; guessing answers {chance:.0%}.",
        "",
        "  length            bytes   questions   answered   memory reads zeroed   by depth, start to end",
    ]
    for score in summary["needles"]:
        factor = str(score["length"] // length)
        zeroed = summary["needle_accuracy_zeroed"].get(factor)
        depths = " ".join(f"{share:.2f}" for share in score["by_depth"])
        lines.append(
            f"  {factor:>3}x training  {score['length']:>8,}   {score['samples']:>9}   {score['accuracy']:>8.1%}   "
            f"{'-' if zeroed is None else format(zeroed, '.1%'):>19}   {depths}"
        )
    return [*lines, "", f"The state of a stream is {summary['state_bytes']:,} bytes at every length."]


def places(folder: Path, picture: Path | None) -> str:
    """Where everything lies, and what to do next."""
    drawn = str(picture) if picture is not None else "(no picture: pip install matplotlib)"
    return "\n".join(
        [
            f"Everything lies in {folder}:",
            f"  {folder / 'summary.json'}   these figures and this text",
            f"  {drawn}   loss and retrieval",
            f"  {folder / 'metrics.jsonl'}, {folder / 'tb'}   every step, with the memories' inner loop",
            f"  {folder / 'checkpoints'}   go on:  miras-generate {folder} --prompt 'Emma '",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
