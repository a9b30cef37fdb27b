"""What `auto` becomes: a layout that runs, and the one that is told beforehand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.models import small_run

from miras_megatron.config.context import MOST_BORDERS
from miras_megatron.config.schema import Run
from miras_megatron.parallel.layout import decide_layout


def long_run(tokens: int, **changes: Any) -> Run:
    """A small model, long rows."""
    run = small_run("m" * 24, **changes)
    return replace(run, data=replace(run.data, sequence_length=tokens))


@pytest.mark.parametrize(("ranks", "tokens"), [(1, 1 << 27), (64, 1 << 23), (256, 1 << 24)])
def test_auto_takes_no_more_pieces_than_packets_tell_apart(ranks: int, tokens: int) -> None:
    """Else the longest rows, which need pieces most, end in an assertion after hours of queueing."""
    layout = decide_layout(long_run(tokens, context=ranks, carry="relay" if ranks > 1 else "local"))
    assert ranks < layout.pieces * ranks <= MOST_BORDERS
