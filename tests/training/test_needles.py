"""If these fail, the figures for retrieval say nothing: needles are planted wrong, or the question can be answered
without remembering."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from miras_megatron.config.schema import Data, Model, Needles, Run
from miras_megatron.training.batch import Row
from miras_megatron.training.needles import (
    Questions,
    attention_reach,
    draw_keys,
    draw_places,
    longest_document,
    make_questions,
    mention_bytes,
    plant_needles,
    score_lengths,
    score_questions,
)

NEEDLES = Needles(rows=1.0, per_row=5, questions=3, answer_weight=10.0, key_bytes=1, marker="@")
TEXT = torch.tensor(list(b"the quick brown fox jumps over the lazy dog and runs away. " * 40))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def plain_row(tokens: int, starts: tuple[int, ...] = ()) -> Row:
    return Row(TEXT[: tokens + 1].clone(), torch.ones(tokens + 1), torch.tensor(starts, dtype=torch.int64))


def mentions(row: Row) -> list[tuple[int, int, int, float]]:
    """(place, key, value, weight of the value) of every mention, in order."""
    places = (row.tokens == ord("@")).nonzero()[:, 0].tolist()
    return [(p, int(row.tokens[p + 1]), int(row.tokens[p + 2]), float(row.loss_mask[p + 2])) for p in places]


@pytest.mark.parametrize("tokens", [67, 128, 1024])
def test_later_mentions_repeat_the_first_and_only_they_are_weighed(tokens: int) -> None:
    """Else the model is asked for what it was never told, or taught what nobody can know."""
    row = plant_needles(NEEDLES)(0, plain_row(tokens), seeded(1))
    told: dict[int, int] = {}
    found = mentions(row)
    for place, key, value, weight in found:
        assert weight == (10.0 if key in told else 0.0)
        assert told.setdefault(key, value) == value
        assert row.loss_mask[place : place + 2].tolist() == [0.0, 0.0]
    count = min(5, (tokens + 1) // (2 * 3 * 4))
    assert len(told) == count and len(found) == 4 * count
    text = torch.ones(tokens + 1, dtype=torch.bool)
    for place, *_ in found:
        text[place : place + 3] = False
    assert torch.equal(row.tokens[text], TEXT[: tokens + 1][text])
    assert row.loss_mask[text].min() == 1.0


def test_a_row_is_a_function_of_its_seed() -> None:
    """Else a resumed run reads other rows than an uninterrupted one."""
    plant = plant_needles(NEEDLES)
    first, again, other = (plant(0, plain_row(128), seeded(seed)) for seed in (3, 3, 4))
    assert torch.equal(first.tokens, again.tokens) and torch.equal(first.loss_mask, again.loss_mask)
    assert not torch.equal(first.tokens, other.tokens)


def test_the_row_it_was_given_stays_as_it_was() -> None:
    """Rows are read from caches that other samples share."""
    row = plain_row(128)
    plant_needles(NEEDLES)(0, row, seeded(0))
    assert torch.equal(row.tokens, TEXT[:129]) and row.loss_mask.min() == 1.0


def test_share_of_rows() -> None:
    """data.needles.rows says how many rows carry needles."""
    plant = plant_needles(replace(NEEDLES, rows=0.25))
    changed = [not torch.equal(plant(n, plain_row(128), seeded(n)).tokens, TEXT[:129]) for n in range(400)]
    assert 0.18 < sum(changed) / 400 < 0.32


def test_no_question_is_asked_in_another_document() -> None:
    """The memory restarts at a document's start: what stands before it can't be known there."""
    row = plain_row(128, (30, 111))
    assert longest_document(row) == (30, 111)
    planted = plant_needles(NEEDLES)(0, row, seeded(2))
    assert mentions(planted) and all(30 <= place <= 108 for place, *_ in mentions(planted))
    crowded = plain_row(20, (5, 10, 15))
    assert plant_needles(NEEDLES)(0, crowded, seeded(2)) is crowded


def test_places_and_keys_never_collide() -> None:
    """Two needles over each other would be one broken needle; two of one key have no one answer."""
    for seed in range(20):
        places = draw_places(20, 64, 3, seeded(seed))
        assert places[0] >= 0 and places[-1] <= 61 and (places.diff() >= 3).all()
        keys = draw_keys(replace(NEEDLES, key_bytes=2), 300, seeded(seed))
        assert len({tuple(key) for key in keys.tolist()}) == 300
        assert keys.min() >= ord("A") and keys.max() <= ord("Z")
    with pytest.raises(ValueError, match=r"data\.needles\.per_row = 27: there are 26 keys"):
        draw_keys(NEEDLES, 27, seeded(0))


def run(**needles: object) -> Run:
    model = Model(block="mac", layers=2, hidden=16, segment=16, conv=4)
    return Run(model=model, data=Data(sequence_length=128, needles=replace(NEEDLES, **needles)))  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [128, 500, 2048])
def test_one_needle_far_from_its_question(length: int) -> None:
    """A needle within attention's reach would be found without memory; two would be another test."""
    reach = attention_reach(run())
    assert reach == 2 * (16 + 3)
    asked = make_questions(TEXT, NEEDLES, length=length, samples=300, reach=reach, seed=5)
    assert asked.tokens.shape == (300, length)
    where = (asked.tokens == ord("@")).nonzero()
    assert where.shape == (600, 2)
    places = where[::2, 1]
    key, value = asked.tokens[torch.arange(300), places + 1], asked.tokens[torch.arange(300), places + 2]
    assert torch.equal(value - ord("0"), asked.answer)
    assert torch.equal(asked.tokens[:, -1], key) and (asked.tokens[:, -2] == ord("@")).all()
    assert (places + 3 + reach <= length - 2).all()
    spread = places.double() / (length - 2 - reach - 3)
    assert (spread - asked.depth).abs().max() < 0.02 and spread.min() < 0.05 and spread.max() > 0.95
    same = make_questions(TEXT, NEEDLES, length=length, samples=300, reach=reach, seed=5)
    assert torch.equal(same.tokens, asked.tokens)


def test_no_room_for_a_needle_is_said() -> None:
    """A test that attention alone can pass is refused rather than run."""
    with pytest.raises(ValueError, match=r"evaluate\.needle_lengths: 38 tokens leave no place"):
        make_questions(TEXT, NEEDLES, length=38, samples=1, reach=38, seed=0)


class Reader(nn.Module):
    """Says what it is told to: `remembers` (the value of the one needle, kept in its state), or noise."""

    def __init__(self, remembers: bool) -> None:
        super().__init__()
        self.remembers, self.zero_memory_reads, self.largest_cut = remembers, False, 0

    def forward(self, tokens: Tensor, states: Tensor | None, return_states: bool) -> tuple[Tensor, Tensor]:
        assert return_states
        self.largest_cut = max(self.largest_cut, tokens.shape[1])
        kept = torch.zeros(len(tokens), dtype=torch.int64) if states is None else states.clone()
        digit = (tokens >= ord("0")) & (tokens <= ord("9"))
        kept = torch.where(digit.any(1), (tokens * digit).amax(1), kept)
        logits = torch.rand(*tokens.shape, 256, generator=seeded(int(tokens.sum())))
        if self.remembers and not self.zero_memory_reads:
            logits[torch.arange(len(tokens)), -1, kept] = 2.0
        return logits, kept


def test_scores_of_a_perfect_and_of_a_guessing_reader() -> None:
    """Accuracy 1 and chance, read in cuts of constant size, with every depth counted."""
    asked = make_questions(TEXT, NEEDLES, length=1334, samples=1000, reach=38, seed=0)
    reader = Reader(remembers=True)
    perfect = score_questions(reader, asked, NEEDLES)
    assert perfect.accuracy == 1.0 and perfect.by_depth == [1.0] * 4 and reader.largest_cut <= 512
    assert (perfect.length, perfect.samples, perfect.chance) == (1334, 1000, 0.1)
    guessed = score_questions(Reader(remembers=False), asked, NEEDLES)
    assert 0.06 < guessed.accuracy < 0.14
    halves = Questions(asked.tokens, torch.where(asked.depth < 0.5, asked.answer, 10), asked.depth)
    assert score_questions(reader, halves, NEEDLES).by_depth == [1.0, 1.0, 0.0, 0.0]


def test_zeroed_reads_are_switched_off_again() -> None:
    """A model measured without its memory must not stay without it."""
    reader = Reader(remembers=True)
    zeroed = score_lengths(reader, run(), TEXT, [1, 4], samples=64, zero_reads=True)
    whole = score_lengths(reader, run(), TEXT, [1, 4, 64], samples=64)
    assert all(score.accuracy < 0.3 for score in zeroed.values())
    assert all(score.accuracy == 1.0 for score in whole.values())
    assert {factor: score.length for factor, score in whole.items()} == {1: 128, 4: 512, 64: 8192}
    assert [score.samples for score in whole.values()] == [64, 64, 16]
    assert mention_bytes(NEEDLES) == 3
