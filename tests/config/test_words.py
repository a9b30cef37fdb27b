"""If this fails, a message says "1 ranks"."""

from __future__ import annotations

from miras_megatron.config.words import counted


def test_a_word_agrees_with_its_number() -> None:
    """None are many."""
    assert [counted(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert counted(2, "microbatch", "es") == "2 microbatches"
