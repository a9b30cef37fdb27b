"""The mathematics: rules, states and the two scans, in plain torch."""

from .chunked import read_memory, replay_scan, scan_memory
from .fused import has_fused
from .rules import RULES, Rule, is_affine, make_rule
from .state import MemoryInputs, MemoryState

__all__ = [
    "RULES",
    "MemoryInputs",
    "MemoryState",
    "Rule",
    "has_fused",
    "is_affine",
    "make_rule",
    "read_memory",
    "replay_scan",
    "scan_memory",
]
