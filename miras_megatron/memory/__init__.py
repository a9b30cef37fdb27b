"""The mathematics: rules, states and the two scans, in plain torch."""

from .chunked import read_memory, scan_memory
from .rules import RULES, Rule, is_affine, make_rule
from .state import MemoryInputs, MemoryState

__all__ = ["RULES", "MemoryInputs", "MemoryState", "Rule", "is_affine", "make_rule", "read_memory", "scan_memory"]
