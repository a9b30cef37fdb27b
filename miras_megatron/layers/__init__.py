"""Mixer blocks on whatever heads they are given: torch and `memory` only, batch first, no process group in sight."""

from .block_spec import BlockSpec
from .blocks import BLOCKS, build_block
from .carry import LocalCarry, StateCarry
from .linear import LinearFactory, PlainLinear

__all__ = ["BLOCKS", "BlockSpec", "LinearFactory", "LocalCarry", "PlainLinear", "StateCarry", "build_block"]
