"""The named rules as configurations see them, without torch: what sizes and checks need to know of each.

`choices.py` beside this file is `miras_megatron/memory/choices.py` once more, byte for byte; a test holds them equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from .choices import PRESETS, Choices, find_choice_problems
from .schema import Memory

RULE_TABLE: dict[str, Choices] = {name: Choices(name=name, **preset) for name, preset in PRESETS.items()}

OWN_FIELDS = ("depth", "expansion", "init", "momentum", "keep")
"""The choices with a field of their own in the section memory; all others are in memory.options."""


def facts_of(memory: Memory) -> Choices:
    """The rule of a run, its changed choices applied. Raises KeyError for an unknown rule."""
    known = {f.name for f in fields(Choices)} - {"name"}
    return replace(RULE_TABLE[memory.rule], **{k: v for k, v in memory.choices.items() if k in known})


def rule_problems(memory: Memory) -> Iterator[str]:
    """Everything wrong with the choices of a run's rule, by the names they have in a configuration."""
    if memory.rule not in RULE_TABLE:
        yield f"memory.rule = {memory.rule!r}: unknown; the named rules are {', '.join(RULE_TABLE)}"
        return
    for name in sorted(set(OWN_FIELDS) & set(memory.options)):
        yield f"memory.options.{name}: has a field of its own; set memory.{name}"
    if "name" in memory.options:
        yield "memory.options.name: has a field of its own; set memory.rule"
    given = {k: v for k, v in memory.choices.items() if k != "name"}
    for problem in find_choice_problems(memory.rule, given):
        own = problem.field in OWN_FIELDS
        yield f"memory.{problem}".replace("leave it out", "set null") if own else f"memory.options.{problem}"
    if "gate_side" in memory.options and memory.gates == "head":
        yield (
            f"memory.options.gate_side = {memory.options['gate_side']!r}: no effect with memory.gates = 'head'; it is "
            "where a channel gate acts; set memory.gates: channel, or leave it out"
        )
