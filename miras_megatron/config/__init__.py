"""What a run is, read and checked without torch."""

from .schema import Run

__all__ = ["Run"]
