"""If these fail, the first thing a newcomer sees compares the model with wrong baselines, or doesn't come up at all."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from miras_megatron.config.schema import Data, Parallel, Run, Training
from miras_megatron.training import quickstart
from miras_megatron.training.baselines import (
    gzip_bits_per_byte,
    held_out_text,
    stream_bits_per_byte,
    unigram_bits_per_byte,
)
from miras_megatron.training.local_ranks import FIRST_STEPS, compare_first, first_steps
from miras_megatron.training.needles import NeedleScore
from miras_megatron.training.picture import draw_quickstart
from miras_megatron.training.quickstart import pace, report
from miras_megatron.training.schedule import learning_rate


class Counter(nn.Module):
    """Gives every token the loss of how many came before it in its stream: only a carried state knows that."""

    def forward(
        self, tokens: Tensor, labels: Tensor, states: Tensor | None, return_states: bool
    ) -> tuple[Tensor, Tensor]:
        before = torch.zeros(len(tokens), 1) if states is None else states
        losses = before + torch.arange(tokens.shape[1])
        assert return_states and labels.shape == tokens.shape
        return losses, before + tokens.shape[1]


def test_a_stream_is_read_once_with_its_state_carried() -> None:
    """A state dropped between cuts would hide what the memory is worth."""
    text = torch.arange(16 * 100 + 1)
    mean = stream_bits_per_byte(Counter(), text, cut=33)
    assert mean == pytest.approx((100 - 1) / 2 / math.log(2))


def test_baselines_on_texts_whose_cost_is_known() -> None:
    """Two equally frequent bytes cost a bit each; a repeated text packs to almost nothing, noise not at all."""
    coin = torch.tensor([7, 9] * 5000)
    assert unigram_bits_per_byte(coin, coin) == pytest.approx(1.0, abs=0.05)
    assert gzip_bits_per_byte(coin) < 0.1
    noise = torch.randint(256, (20000,), generator=torch.Generator().manual_seed(0))
    assert 8.0 <= gzip_bits_per_byte(noise) < 8.1
    assert unigram_bits_per_byte(coin, torch.tensor([7, 0])) > 5.0


def test_each_length_is_told_as_soon_as_it_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Minutes of silence look like a hang."""
    told = []

    def score(_: nn.Module, run: Run, text: Tensor, factors: list[int], **options: bool) -> dict[int, NeedleScore]:
        told.append(capsys.readouterr().out)
        return {factors[0]: NeedleScore(1, 1, 0.1, factors[0] / 100, [])}

    monkeypatch.setattr(quickstart, "score_lengths", score)
    assert list(quickstart.ask(nn.Identity(), Run(), torch.arange(3), [1, 4])) == [1, 4]
    quickstart.ask(nn.Identity(), Run(), torch.arange(3), [16], zero_reads=True)
    told.append(capsys.readouterr().out)
    lines = ["1x training length: 1.0%", "4x training length: 4.0%", "16x training length, memory reads zeroed: 16.0%"]
    assert told == ["", *(f"  needles at {line} answered\n" for line in lines)]


def test_held_out_text_was_not_trained_on() -> None:
    """Baselines and model must be measured on the same unseen chapters."""
    run = Run(data=Data(split="95,5,0"))
    seen, unseen = held_out_text(run, "train"), held_out_text(run, "validation")
    assert len(seen) > 10 * len(unseen) > 200_000
    assert bytes(unseen[:400].tolist()) not in bytes(seen.tolist())
    with pytest.raises(ValueError, match=r"data\.train = 'other'"):
        held_out_text(Run(data=Data(train="other")), "train")


def test_report_and_picture_of_a_summary(tmp_path: Path) -> None:
    """What is printed and drawn is what the summary says."""
    steps = [{"step": n, "loss": 3.0 / n, "tokens": 1024, "seconds": 0.5} for n in range(1, 5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    assert pace(tmp_path) == {"tokens": 4096, "tokens_per_s": 2048.0}
    score = {"length": 2048, "samples": 256, "chance": 0.1, "accuracy": 0.97265625, "by_depth": [1.0, 1.0, 0.95, 0.94]}
    summary = {
        "parameters": 340_000,
        "bits_per_byte": 2.5,
        "gzip_bits_per_byte": 3.0,
        "unigram_bits_per_byte": 4.3,
        "sequence_length": 128,
        "attention_segment": 32,
        "needle_samples": 256,
        "chance": 0.1,
        "needles": [score],
        "needle_accuracy": {"16": 0.97265625},
        "needle_accuracy_zeroed": {"16": 0.1015625},
        "state_bytes": 697_392,
    } | pace(tmp_path)
    text = "\n".join(report(summary))
    for part in ("340,000 parameters", "2.500 bits per byte", "16x", "2,048", "97.3%", "10.2%", "697,392 bytes"):
        assert part in text
    picture = draw_quickstart(tmp_path, summary)
    assert picture is not None and picture.read_bytes()[:4] == b"\x89PNG"


def test_ranks_that_learn_something_else_end_with_an_error(tmp_path: Path) -> None:
    """`make run` shows a newcomer whether sharing rows works on their machine: it must not pass over a fault."""
    for name, shift in (("many", 0.0), ("one", 1e-7), ("off", 1e-3)):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"step": step, "loss": (6.0 - step) * (1 + shift)}) for step in range(1, 9)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines))
    assert "those of one rank to 1e-07" in compare_first(tmp_path / "many", tmp_path / "one")
    with pytest.raises(ValueError, match=r"several ranks and of one differ by 1\.0e-03"):
        compare_first(tmp_path / "many", tmp_path / "off")


def test_one_rank_takes_the_first_steps_at_the_rates_of_the_whole_run(tmp_path: Path) -> None:
    """Another learning rate would make other losses from step 2 on, and a false alarm."""
    run = Run(data=Data(), parallel=Parallel(context=2), training=Training(steps=100))
    few = first_steps(run, tmp_path)
    assert few.parallel == Parallel() and few.training.steps == FIRST_STEPS
    for step in range(1, FIRST_STEPS + 1):
        assert learning_rate(step, few.optimizer, few.training.steps) == learning_rate(step, run.optimizer, 100)
