"""Counts as people say them."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "s") -> str:
    """1 rank, 2 ranks; with another ending 2 batches."""
    return f"{number} {noun}{'' if number == 1 else plural}"
