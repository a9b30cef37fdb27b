"""How a state may cross ranks that share a sequence, by the names of `parallel.carry`."""

from __future__ import annotations

from .carry_heads import HeadsCarry
from .carry_relay import RelayCarry
from .carry_scan import ScanCarry

CARRIES: dict[str, type[RelayCarry]] = {"relay": RelayCarry, "scan": ScanCarry, "heads": HeadsCarry}
"""Which of them fits which rule and block is said in `config/context.py`, before anything is built."""
