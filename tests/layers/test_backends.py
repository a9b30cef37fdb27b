"""Which scan serves a rule."""

from __future__ import annotations

import pytest

from miras_megatron.layers.backends import pick_scan
from miras_megatron.memory import make_rule, scan_memory


def test_scans_are_picked_by_name() -> None:
    """A misspelt backend must not silently run the slow one."""
    assert pick_scan(make_rule("titans")) is scan_memory
    with pytest.raises(ValueError, match="backend = 'tritn'"):
        pick_scan(make_rule("titans"), "tritn")
