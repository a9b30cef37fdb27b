"""If these fail, --dry-run sizes another memory than the one that is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

import miras_megatron
from miras_megatron.config.rule_table import OWN_FIELDS, RULE_TABLE, facts_of, rule_problems
from miras_megatron.config.schema import Memory
from miras_megatron.memory import RULES, make_rule

PACKAGE = Path(miras_megatron.__file__).parent


def test_the_choices_are_one_file_twice() -> None:
    """The memory's maths may import nothing of ours and a configuration no torch, so the file is there twice."""
    assert (PACKAGE / "config/choices.py").read_bytes() == (PACKAGE / "memory/choices.py").read_bytes()


@pytest.mark.parametrize("name", RULES)
def test_facts_are_those_of_the_rule(name: str) -> None:
    """Sizes and checks reckon with what is trained."""
    rule, facts = RULES[name], RULE_TABLE[name]
    assert vars(facts) == vars(rule)
    assert (facts.exact, facts.gates) == (rule.exact, rule.gates)


def test_problems_of_the_rule_have_their_names_in_the_file() -> None:
    """What make_rule would say when the model is built is said with the other problems of the file, all of it."""
    memory = Memory(
        rule="titans", depth=1, expansion=2, options={"link": "exact_link", "windw": 3, "gate_side": "rows"}
    )
    lines = list(rule_problems(memory))
    assert [line.split(" = ")[0].split(":")[0] for line in lines] == [
        "memory.options.windw",
        "memory.options.link",
        "memory.expansion",
        "memory.options.gate_side",
    ]
    with pytest.raises(ValueError) as refused:
        make_rule(memory.rule, **memory.choices)
    told = [
        line.removeprefix("memory.").removeprefix("options.").replace("set null", "leave it out") for line in lines[:-1]
    ]
    assert str(refused.value).splitlines()[1:] == [f"  {line}" for line in told]


def test_fields_of_their_own_are_the_ones_choices_takes() -> None:
    """Otherwise a problem would be told under a name that the file doesn't know."""
    given = {"depth": 3, "expansion": 2, "init": "unit", "momentum": False, "keep": False}
    assert tuple(given) == OWN_FIELDS and Memory(**given).choices == given


def test_changed_choices_change_the_facts() -> None:
    """Ablations are sized as what they are."""
    memory = Memory(
        rule="atlas", depth=1, momentum=False, options={"newton_schulz": "off", "degree": 2, "residual": False}
    )
    facts = facts_of(memory)
    rule = make_rule(memory.rule, **memory.choices)
    assert (facts.depth, facts.momentum, facts.degree) == (1, False, 2)
    assert facts.shapes(5) == rule.shapes(5) == [(5, 21)]
