"""Ways of sharing a sequence that can't work are named before anything starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.models import small_run

from miras_megatron.config.context import context_problems, fitting_carries, is_affine
from miras_megatron.config.rule_table import RULE_TABLE
from miras_megatron.memory import RULES, make_rule
from miras_megatron.memory.rules import is_affine as is_affine_of_rule


def problems(pattern: str, **changes: Any) -> list[str]:
    """Of `small_run` (rows of 32 tokens, 2 heads)."""
    return list(context_problems(small_run(pattern, **changes)))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("gates", ["head", "channel"])
def test_configurations_and_the_mathematics_agree_on_what_is_affine(name: str, gates: str) -> None:
    """Else a nonlinear memory would be composed as if it were linear, and train on wrong states."""
    assert is_affine(RULE_TABLE[name], gates) == is_affine_of_rule(make_rule(name), gates == "channel")


@pytest.mark.parametrize(
    ("pattern", "changes", "start"),
    [
        ("m", {"context": 2, "carry": "scan"}, "parallel.carry = 'scan': memory.rule = 'titans' is not affine"),
        ("m", {"context": 2, "carry": "local"}, "parallel.carry = 'local': parallel.context = 2 ranks share"),
        ("c", {"context": 2, "carry": "heads"}, "parallel.carry = 'heads': memory as context"),
        ("m", {"context": 4, "carry": "heads"}, "parallel.carry = 'heads': model.heads = 2 is not divisible"),
        ("g", {"context": 2, "carry": "heads", "write_persistent": True}, "parallel.carry = 'heads': with model.write"),
        ("m", {"context": 3}, "data.sequence_length = 32: must be a multiple of parallel.context (3) = 3; nearest 33"),
        ("m", {"context": 2, "pieces": 3}, "data.sequence_length = 32: must be a multiple of parallel.context (2) x"),
        ("ma", {"context": 2}, "model.pattern: full attention (letter a) needs whole sequences"),
        ("m", {"pieces": 0}, "parallel.pieces = 0: must be auto, or at least 1"),
        ("m", {"pieces": 2, "recompute": True}, "training.recompute = true: with parallel.context"),
        ("c", {"context": 2, "head_groups": 2}, "parallel.head_groups = 2: memory as context"),
        ("m", {"context": 2, "head_groups": 3}, "parallel.head_groups = 3: a rank has 2 heads"),
        ("mm", {"pipeline": 2, "forwards_ahead": 1}, "parallel.forwards_ahead = 1: with parallel.pipeline = 2"),
        (
            "m",
            {"pieces": 1, "keep_states": "host"},
            "parallel.keep_states = 'host': no effect where a rank has one piece",
        ),
        ("m", {"pieces": 1, "replay_every": 2}, "parallel.replay_every = 2: no effect where a rank has one piece"),
        ("m", {"pieces": 1, "head_groups": 2}, "parallel.head_groups = 2: no effect where one rank has whole rows"),
        ("m", {"context": 2, "carry": "heads", "keep_states": "host"}, "parallel.keep_states = 'host': no effect"),
        ("m", {"context": 2, "replay_every": 2}, "parallel.replay_every = 2: with parallel.context = 2"),
        (
            "m",
            {"context": 2, "tensor": 2, "sequence": True, "pieces": 16},
            "data.sequence_length = 32: with parallel.seq",
        ),
    ],
)
def test_each_bad_layout_is_named(pattern: str, changes: dict[str, Any], start: str) -> None:
    """Field, value, reason."""
    assert any(problem.startswith(start) for problem in problems(pattern, **changes)), problems(pattern, **changes)


def test_all_bad_choices_come_together() -> None:
    """Nobody mends a layout one queue time after the other."""
    found = problems("c", context=3, carry="heads", head_groups=2, pieces=2, recompute=True)
    assert len(found) >= 4, found
    found = problems("m", pieces=1, keep_states="host", replay_every=2, head_groups=2)
    assert [problem.split(" = ")[0] for problem in found] == [
        "parallel.keep_states",
        "parallel.replay_every",
        "parallel.head_groups",
    ]


def test_a_refused_carry_names_those_that_fit() -> None:
    """The way out."""
    assert fitting_carries(small_run("m", context=2)) == ["relay", "heads"]
    assert fitting_carries(small_run("m", context=2, rule="gated_deltanet")) == ["relay", "scan", "heads"]
    assert fitting_carries(small_run("c", context=2)) == ["relay"]


def test_what_works_is_let_through() -> None:
    """Every carry, with whatever it takes."""
    assert problems("mcgw", context=2, pieces=2) == []
    assert problems("m", context=2, carry="heads") == []
    assert problems("m", context=2, carry="scan", rule="retnet") == []
    assert problems("m", context=2, pieces=2, keep_states="host") == []
    assert problems("m", context=2, pieces=1, forwards_ahead=1, keep_states="host") == []
    assert problems("m", pieces=2, head_groups=2) == []
    assert problems("m", context=2, pieces=1, head_groups=2) == []
    # auto may take pieces, and says where it doesn't
    assert problems("m", keep_states="host", replay_every=2, head_groups=2) == []
    long = small_run("m", pieces=4, replay_every=2)
    assert list(context_problems(replace(long, data=replace(long.data, sequence_length=64)))) == []
