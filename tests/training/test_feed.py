"""Which rows a step reads: the same on any number of ranks, and long ones at the planned share of steps."""

import pytest
from helpers.tiny_run import tiny_config

from miras_megatron.config.load import load_run
from miras_megatron.training.feed import make_feed
from miras_megatron.training.tokenizer import ByteTokenizer

LONG = {"data__needles": "{long_rows: 0.5, long_factor: 3, per_row: 1}", "data__sequence_length": 32}


def feed_of(folder, rank=0, ranks=1, **changes):
    return make_feed(load_run(tiny_config(folder, **changes)), ByteTokenizer(), rank=rank, ranks=ranks)


def test_a_step_takes_the_global_batch(tmp_path):
    """Two ranks together read what one reads."""
    alone = [row for batch in feed_of(tmp_path).step(1) for row in batch.samples.tolist()]
    shared = [row for rank in (0, 1) for batch in feed_of(tmp_path, rank, 2).step(1) for row in batch.samples.tolist()]
    assert sorted(alone) == sorted(shared) == [0, 1, 2, 3]


def test_long_rows_come_at_the_planned_share_of_steps_on_every_rank_alike(tmp_path):
    """Ranks that disagree about the length of a row wait for each other for ever."""
    feeds = [feed_of(tmp_path, rank, 2, **LONG) for rank in (0, 1)]
    long = [step for step in range(1, 201) if feeds[0].is_long(step)]
    assert long == [step for step in range(1, 201) if feeds[1].is_long(step)]
    assert 70 < len(long) < 130
    usual, longer = (feeds[0].step(step) for step in (next(s for s in range(1, 99) if s not in long), long[0]))
    assert usual[0].tokens.shape == (2, 32)
    assert longer[0].tokens.shape == (1, 96)


def test_the_position_covers_both_kinds_of_rows(tmp_path):
    """A resumed run reads on where each stood."""
    feed, again = feed_of(tmp_path, **LONG), feed_of(tmp_path, **LONG)
    for step in range(1, 6):
        feed.step(step)
    again.seek(feed.position())
    for step in range(6, 12):
        for one, other in zip(feed.step(step), again.step(step), strict=True):
            assert one.samples.tolist() == other.samples.tolist()
            assert (one.tokens == other.tokens).all()


def test_ordered_packing_refuses_long_rows(tmp_path):
    """A lane goes on from rows of its own length only."""
    with pytest.raises(ValueError, match="data.needles.long_rows"):
        feed_of(tmp_path, **LONG, data__packing="ordered")
