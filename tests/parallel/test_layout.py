"""What `auto` becomes: a layout that runs, and the one that is told beforehand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.models import small_run

from miras_megatron.config.context import MOST_BORDERS
from miras_megatron.config.schema import Run
from miras_megatron.parallel.layout import decide_layout, layout_warnings
from miras_megatron.training.dry_run import describe_run


def long_run(tokens: int, **changes: Any) -> Run:
    """A small model, long rows."""
    run = small_run("m" * 24, **changes)
    return replace(run, data=replace(run.data, sequence_length=tokens))


@pytest.mark.parametrize(("ranks", "tokens"), [(1, 1 << 27), (64, 1 << 23), (256, 1 << 24)])
def test_auto_takes_no_more_pieces_than_packets_tell_apart(ranks: int, tokens: int) -> None:
    """Else the longest rows, which need pieces most, end in an assertion after hours of queueing."""
    layout = decide_layout(long_run(tokens, context=ranks, carry="relay" if ranks > 1 else "local"))
    assert ranks < layout.pieces * ranks <= MOST_BORDERS


@pytest.mark.parametrize("context", [1, 2])
def test_a_dry_run_counts_the_pieces_that_will_be(context: int) -> None:
    """Whole slices counted where pieces will be walked promise too much memory for states and logits."""
    auto = long_run(1 << 19, context=context, vocab_size=4096)
    layout = decide_layout(auto)
    assert layout.pieces > 1
    decided = replace(auto, parallel=replace(auto.parallel, pieces=layout.pieces))
    whole = replace(auto, parallel=replace(auto.parallel, pieces=1))
    assert memory_line(auto, context) == memory_line(decided, context) != memory_line(whole, context)


def test_what_auto_leaves_without_effect_is_said() -> None:
    """Whoever asks for states in host memory, or for groups of heads, must not believe that they are there."""
    short, long = (long_run(tokens, keep_states="host", replay_every=2, head_groups=2) for tokens in (256, 1 << 19))
    assert list(layout_warnings(long)) == []
    first, second, third = layout_warnings(short)
    assert first.startswith("parallel.keep_states = 'host': no effect")
    assert second.startswith("parallel.replay_every = 2: no effect")
    assert third.startswith("parallel.head_groups = 2: no effect")
    of_bytes = replace(short, model=replace(short.model, vocab_size=None))
    assert f"note: {first}" in describe_run(of_bytes, "run.yaml").splitlines()


@pytest.mark.parametrize("pieces", ["auto", 8])
def test_one_rank_takes_the_head_groups_it_was_given(pieces: int | str) -> None:
    """Else a choice that pieces give an effect is dropped silently where `auto` decided the pieces."""
    layout = decide_layout(long_run(1 << 19, head_groups=2, pieces=pieces))
    assert layout.pieces > 1 and layout.head_groups == 2
    assert decide_layout(long_run(256, head_groups=2)).head_groups == 1


def memory_line(run: Run, ranks: int) -> str:
    """What a dry run says of memory."""
    return next(line for line in describe_run(run, "run.yaml", ranks).splitlines() if line.startswith("memory"))
