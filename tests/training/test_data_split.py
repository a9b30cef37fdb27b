"""If these failed, validation would be measured on training text, or sets be drawn in other shares than asked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.data_sets import RAGGED, STRIDE, write_set

from miras_megatron.training.blend import PARTS, Blend, apportion, split_documents
from miras_megatron.training.data import MixedSamples
from miras_megatron.training.shuffle import mix, permute, shuffled


@pytest.mark.parametrize("count", [1, 2, 3, 10, 99, 100, 1001])
@pytest.mark.parametrize("shares", [(98.0, 1.0, 1.0), (99.0, 1.0, 0.0), (100.0, 0.0, 0.0), (1.0, 1.0, 1.0)])
def test_the_parts_share_no_document_and_lose_none(count: int, shares: tuple[float, ...]) -> None:
    """A document in two parts leaks the answers; one in none is wasted."""
    bounds = [split_documents(count, shares, part) for part in PARTS]
    assert bounds[0][0] == 0 and bounds[-1][1] == count
    assert all(before[1] == after[0] for before, after in zip(bounds, bounds[1:], strict=False))
    if count >= 3:
        assert all((last > first) == (share > 0) for (first, last), share in zip(bounds, shares, strict=True))


def test_validation_rows_hold_validation_documents_only(tmp_path: Path) -> None:
    """The same through the whole chain: which tokens come out of which part."""
    files = write_set(tmp_path, RAGGED)
    seen = {}
    for part in PARTS:
        samples = MixedSamples([files], [1.0], length=5, split=(0.6, 0.2, 0.2), part=part)
        tokens = np.concatenate([samples.row(number).tokens.numpy() for number in range(60)])
        seen[part] = set((tokens // STRIDE).tolist())
    assert seen == {"train": set(range(6)), "validation": {6, 7}, "test": {8, 9}}


def test_a_split_without_documents_is_refused(tmp_path: Path) -> None:
    """One book cannot be split by document; the message says what to do."""
    with pytest.raises(
        ValueError, match=r"data.split = '99,1,0' by document leaves none of its 1 documents.*validation"
    ):
        MixedSamples([write_set(tmp_path, [90])], [1.0], length=5, split=(0.99, 0.01, 0.0), part="validation")


@pytest.mark.parametrize("weights", [[1.0], [1, 1], [0.9, 0.1], [1e-6, 1.0], [3, 2, 5, 7]])
def test_a_blend_of_any_weights_is_complete(weights: list[float]) -> None:
    """Sample numbers within a set must be 0, 1, 2 .. with no gap, or rows are skipped for ever."""
    blend = Blend(weights)
    counts = [0] * len(weights)
    for sample in range(2 * blend.period + 3):
        chosen, number = blend.locate(sample)
        assert number == counts[chosen]
        counts[chosen] += 1
    assert min(counts) > 0
    wanted = np.array(weights) / sum(weights)
    assert np.abs(np.array(counts) / sum(counts) - wanted).max() < 2e-4 * len(weights)


def test_apportioning_spends_the_whole() -> None:
    """Shares that do not add up would shift every later document into another part."""
    for total in range(40):
        assert apportion([0.98, 0.01, 0.01], total).sum() == total


@pytest.mark.parametrize("count", [1, 2, 3, 16, 17, 100, 1334])
def test_a_permutation_is_one(count: int) -> None:
    """A row shuffle that hits one row twice never shows another."""
    for key in (0, 1, 2**63):
        assert sorted(permute(index, count, key) for index in range(count)) == list(range(count))
        assert sorted(shuffled(count, key).tolist()) == list(range(count))
    assert count < 16 or [permute(i, count, 1) for i in range(count)] != [permute(i, count, 2) for i in range(count)]


def test_orders_stay_what_they_were() -> None:
    """Resume over an upgrade rests on these very numbers; a change here breaks every checkpoint's data position."""
    assert mix(1, 2, 3) == MIXED
    assert shuffled(8, 7).tolist() == SHUFFLED
    assert [permute(index, 8, 7) for index in range(8)] == PERMUTED


MIXED = 15020427595393229491
SHUFFLED = [7, 1, 2, 3, 5, 4, 0, 6]
PERMUTED = [5, 6, 3, 2, 7, 0, 1, 4]
