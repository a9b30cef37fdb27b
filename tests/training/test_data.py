"""If these failed, a run would train on rows it does not know: wrong borders, lost text, another order on resume."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.data_sets import RAGGED, STRIDE, same, write_set

from miras_megatron.training.batch import Row
from miras_megatron.training.data import Batches, MixedSamples
from miras_megatron.training.packing import PackedRows

LENGTHS = [1, 2, 16, 63, 100, 400]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("packing", ["reset", "ordered"])
def test_boundaries_stand_where_documents_start(tmp_path: Path, length: int, packing: str) -> None:
    """A document start that is missed leaks a document's memory into the next one; one too many forgets."""
    samples = MixedSamples([write_set(tmp_path, RAGGED)], [1.0], length=length, packing=packing, lanes=2)
    for number in range(30):
        batch = Batches(samples, micro_batch=2).batch(number)
        assert batch.cu_seqlens is not None
        for tokens, labels, mask, cuts in zip(
            batch.tokens, batch.labels, batch.loss_mask, batch.cu_seqlens, strict=True
        ):
            starts = [place for place in range(1, length) if tokens[place] % STRIDE == 0]
            assert cuts.tolist() == [0, *starts, length]
            assert torch.equal(labels[:-1], tokens[1:])
            assert torch.equal(mask, (labels % STRIDE != 0).float()), (
                "no loss on a token that another document precedes"
            )


def test_packing_without_resets_counts_every_token(tmp_path: Path) -> None:
    """`plain` promises rows without borders: state and loss run through."""
    samples = MixedSamples([write_set(tmp_path, RAGGED)], [1.0], length=63, packing="plain")
    batch = Batches(samples, micro_batch=4).batch(0)
    assert batch.cu_seqlens is None and bool((batch.loss_mask == 1).all())


@pytest.mark.parametrize("length", [1, 7, 16, 63])
def test_an_epoch_shows_every_token_once(tmp_path: Path, length: int) -> None:
    """Text that is never shown, or shown twice, biases a model unseen."""
    files = write_set(tmp_path, RAGGED)
    rows = PackedRows(files, np.arange(len(RAGGED)), length, key=5, resets=True)
    for epoch in (0, 1):
        numbers = range(epoch * rows.rows_per_epoch, (epoch + 1) * rows.rows_per_epoch)
        labels = torch.cat([rows.row(number).tokens[1:] for number in numbers]).tolist()
        assert len(set(labels)) == len(labels) == (sum(RAGGED) - 1) // length * length
    first, second = (rows.row(number).tokens.tolist() for number in (0, rows.rows_per_epoch))
    assert length == 1 or first != second, "another epoch has another order"


def test_a_set_shorter_than_a_row_repeats_within_it(tmp_path: Path) -> None:
    """A first try with a tiny file must train, not divide by zero."""
    samples = MixedSamples([write_set(tmp_path, [3, 2])], [1.0], length=16)
    batch = Batches(samples, micro_batch=3).batch(2)
    assert batch.tokens.shape == (3, 16) and set(batch.tokens.flatten().tolist()) == {0, 1, 2, STRIDE, STRIDE + 1}


@pytest.mark.parametrize("packing", ["reset", "plain", "ordered"])
@pytest.mark.parametrize("workers", [0, 2])
def test_resume_is_exact_at_every_position(tmp_path: Path, packing: str, workers: int) -> None:
    """A resumed run that reads other rows is another run."""
    samples = MixedSamples([write_set(tmp_path, RAGGED)], [1.0], length=16, packing=packing, lanes=4, seed=3)
    straight = Batches(samples, micro_batch=2, rank=1, size=2, workers=workers)
    states, seen = [], []
    for _ in range(25):
        states.append(straight.position())
        seen.append(next(straight))
    for state, batch in zip(states, seen, strict=True):
        resumed = Batches(samples, micro_batch=2, rank=1, size=2, workers=workers)
        next(resumed)
        resumed.seek(state)
        assert same(next(resumed), batch)
        assert resumed.position()["samples"] == state["samples"] + 4


@pytest.mark.parametrize("packing", ["reset", "ordered"])
def test_the_order_is_the_same_on_any_number_of_ranks(tmp_path: Path, packing: str) -> None:
    """Data-parallel size is a layout, not a hyperparameter: the samples of a step must not hang on it."""
    samples = MixedSamples([write_set(tmp_path, RAGGED)], [1.0], length=16, packing=packing, lanes=8, seed=3)
    alone = torch.cat([Batches(samples, micro_batch=4).batch(number).tokens for number in range(4)])
    ranks = [Batches(samples, micro_batch=2, rank=rank, size=2) for rank in (0, 1)]
    shared = torch.cat([ranks[rank].batch(number).tokens for number in range(4) for rank in (0, 1)])
    assert torch.equal(alone, shared)


def test_lanes_read_whole_documents_in_order(tmp_path: Path) -> None:
    """State is carried from row to row of a lane: a gap or a swap would hand it to the wrong text."""
    samples = MixedSamples([write_set(tmp_path, RAGGED)], [1.0], length=7, packing="ordered", lanes=3, seed=1)
    batches = Batches(samples, micro_batch=3)
    steps = [next(batches) for _ in range(60)]
    for lane in range(3):
        tokens = torch.cat([batch.tokens[lane] for batch in steps])
        for place in range(1, len(tokens)):
            follows = tokens[place] == tokens[place - 1] + 1
            ended = tokens[place - 1] % STRIDE == RAGGED[tokens[place - 1] // STRIDE] - 1
            assert follows if not ended else tokens[place] % STRIDE == 0
        resets = [bool(batch.reset[lane]) for batch in steps]
        assert resets == [int(batch.tokens[lane, 0]) % STRIDE == 0 for batch in steps]
    assert all(batch.lanes.tolist() == [0, 1, 2] for batch in steps)


def test_a_blend_keeps_its_proportions_and_each_set_its_order(tmp_path: Path) -> None:
    """Weights are a promise about what a model sees; within a set no row may be lost to the mixing."""
    sets = [write_set(tmp_path, [40] * 9, name) for name in "abc"]
    alone = [PackedRows(files, np.arange(9), 8, key=0, resets=True) for files in sets]
    samples = MixedSamples(sets, [0.7, 0.2, 0.1], length=8)
    counts = np.zeros(3)
    for number in range(2000):
        chosen, place = samples._blend.locate(number)
        assert place == counts[chosen]
        counts[chosen] += 1
        assert np.abs(counts - (number + 1) * np.array([0.7, 0.2, 0.1])).max() < 1.5
    assert all(rows.rows_per_epoch == 9 * 40 // 8 - 1 for rows in alone)


def test_ordered_lanes_are_shared_out_by_weight(tmp_path: Path) -> None:
    """A blend of long documents gives each set whole lanes, since a lane never changes its set."""
    sets = [write_set(tmp_path, [50] * 12, "a"), write_set(tmp_path, [50] * 12, "b")]
    samples = MixedSamples(sets, [0.75, 0.25], length=8, packing="ordered", lanes=8)
    assert [home for home, _ in samples._lane_homes] == [0] * 6 + [1] * 2


@pytest.mark.parametrize("packing", ["reset", "plain", "ordered"])
def test_masks_follow_their_tokens(tmp_path: Path, packing: str) -> None:
    """A prompt's mask that slips by one trains on the prompt or hides the answer."""
    masks = [(np.arange(length) % 3 != 0).astype(np.uint8) for length in RAGGED]
    files = write_set(tmp_path, RAGGED, masks=masks)
    samples = MixedSamples([files], [1.0], length=16, packing=packing, lanes=2)
    for number in range(12):
        batch = Batches(samples, micro_batch=2).batch(number)
        place = batch.labels % STRIDE
        wanted = (place % 3 != 0) & ((place != 0) | (packing == "plain"))
        assert torch.equal(batch.loss_mask, wanted.float())


def test_a_transform_hangs_on_the_sample_alone(tmp_path: Path) -> None:
    """Needles must be where they were after a resume, on other ranks and with read-ahead."""

    def plant(sample: int, row: Row, generator: torch.Generator) -> Row:
        tokens = row.tokens.clone()
        tokens[int(torch.randint(len(tokens), (), generator=generator))] = sample
        return Row(tokens, row.loss_mask, row.starts, row.reset)

    samples = MixedSamples([write_set(tmp_path, RAGGED)], [1.0], length=16)
    alone = Batches(samples, micro_batch=4, transform=plant, seed=9)
    wanted = [next(alone) for _ in range(3)]
    ahead = Batches(samples, micro_batch=4, transform=plant, seed=9, workers=2)
    assert all(same(next(ahead), batch) for batch in wanted)
    half = Batches(samples, micro_batch=2, rank=1, size=2, transform=plant, seed=9)
    assert torch.equal(half.batch(1).tokens, wanted[1].tokens[2:])
    other = Batches(samples, micro_batch=4, transform=plant, seed=10).batch(0)
    assert not torch.equal(other.tokens, wanted[0].tokens)


def test_a_position_of_other_data_is_refused(tmp_path: Path) -> None:
    """Resuming on other files would go on silently with other text."""
    samples = MixedSamples([write_set(tmp_path, RAGGED)], [1.0], length=16)
    other = MixedSamples([write_set(tmp_path, [*RAGGED, 5], "other")], [1.0], length=16)
    with pytest.raises(ValueError, match="other files, tokenizer"):
        Batches(other, micro_batch=2).seek(Batches(samples, micro_batch=2).position())
    odd = {**Batches(samples, micro_batch=2).position(), "samples": 6}
    with pytest.raises(ValueError, match=r"training.micro_batch = 2: 6 samples.*2 ranks x 2"):
        Batches(samples, micro_batch=2, size=2).seek(odd)


def test_too_few_documents_for_the_lanes_are_refused(tmp_path: Path) -> None:
    """Two lanes cannot read one document in order."""
    with pytest.raises(ValueError, match=r'data.packing = "ordered".*2 documents for 3 lanes.*global_batch'):
        MixedSamples([write_set(tmp_path, [50, 60])], [1.0], length=8, packing="ordered", lanes=3)
