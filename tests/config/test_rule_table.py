"""If these fail, --dry-run sizes another memory than the one that is trained."""

from __future__ import annotations

from dataclasses import fields

import pytest

from miras_megatron.config.rule_table import RULE_TABLE, RuleFacts, facts_of
from miras_megatron.config.schema import Memory
from miras_megatron.memory import RULES, make_rule


def test_the_table_names_every_rule() -> None:
    """A rule that is missing here can't be configured."""
    assert list(RULE_TABLE) == list(RULES)


@pytest.mark.parametrize("name", RULES)
def test_facts_are_those_of_the_rule(name: str) -> None:
    """The table repeats `RULES` without torch; a repeated truth is held against the first."""
    rule, facts = RULES[name], RULE_TABLE[name]
    assert {f.name: getattr(facts, f.name) for f in fields(RuleFacts)} == {
        f.name: getattr(rule, f.name) for f in fields(RuleFacts)
    }
    assert facts.exact == rule.exact
    assert facts.takes_delta == ("delta" in rule.gates)
    for head_dim in (7, 48):
        assert facts.shapes(head_dim) == rule.shapes(head_dim)


def test_changed_choices_change_the_facts() -> None:
    """Ablations are sized as what they are."""
    memory = Memory(
        rule="atlas", depth=1, momentum=False, options={"newton_schulz": "off", "degree": 2, "residual": False}
    )
    facts = facts_of(memory)
    rule = make_rule(memory.rule, **memory.choices)
    assert (facts.depth, facts.momentum, facts.degree) == (1, False, 2)
    assert facts.shapes(5) == rule.shapes(5) == [(5, 21)]
