"""One rank asks, all answer, one verdict: else five hundred ranks that hang drown the store they ask through."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from miras_megatron.parallel.notices import Notices
from miras_megatron.training.questions import Questions
from miras_megatron.training.stuck_report import Answer, Verdict

PATIENCE = 2.0


def answer() -> Answer:
    """Of a rank that waits."""
    return Answer("rank", "step 3", 3, 9.0, True, "all_reduce among ranks 0, 1", "main thread:")


def stores(kind: str) -> list[Any]:
    """Three connections to one store, of the kind in which ranks really meet, or one in memory."""
    if kind == "memory":
        return [dist.HashStore()] * 3
    first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    others = [dist.TCPStore("127.0.0.1", first.port, timeout=timedelta(seconds=20)) for _ in range(2)]
    return [dist.PrefixStore("notices", store) for store in (first, *others)]


@pytest.fixture(params=["memory", "tcp"])
def ranks(request: pytest.FixtureRequest) -> list[Questions]:
    """Three."""
    found = stores(request.param)
    return [
        Questions(Notices(store, "rank 0"), rank, 3, answer, PATIENCE, tick=0.05) for rank, store in enumerate(found)
    ]


def test_of_ranks_that_ask_at_once_one_does(ranks: list[Questions]) -> None:
    """In a step that hangs all are over their limit within a moment."""
    assert [rank.ask() for rank in ranks] == ["1.0", None, None]
    for rank in ranks:
        assert rank.answer() is None
    assert ranks[1].ask() is None, "a question is open"
    assert sorted(ranks[0].gather("1.0", PATIENCE)) == [0, 1, 2]


def test_an_asker_that_dies_is_given_up(ranks: list[Questions]) -> None:
    """Its question would stay open, and nobody would ever decide."""
    assert ranks[0].ask() == "1.0"
    ranks[1].answer()
    ranks[1]._seen -= PATIENCE + 1
    assert ranks[1].ask() == "2.1"
    ranks[2].answer()
    ranks[0].answer()  # it wasn't dead
    assert sorted(ranks[1].gather("2.1", PATIENCE)) == [0, 1, 2]


def test_the_first_verdict_holds(ranks: list[Questions]) -> None:
    """Two that decide must not tell two stories."""
    first, second = Verdict("1.0", 0, [0], [1, 2], []), Verdict("2.1", 1, [1], [0], ["rank 2: ValueError: x"])
    ranks[0].decide(first)
    ranks[1].decide(second)
    assert [rank.answer() for rank in ranks] == [first] * 3


def test_who_gathers_stops_when_another_has_decided(ranks: list[Questions]) -> None:
    """It may be the one that tells, and the others don't wait longer than that."""
    question = ranks[0].ask()
    assert question is not None
    ranks[2].decide(Verdict("2.2", 2, [2], [], []))
    began = time.monotonic()
    ranks[0].gather(question, PATIENCE)
    assert time.monotonic() - began < PATIENCE / 2


def test_a_question_in_vain_is_known_to_all_and_leaves_nothing(ranks: list[Questions]) -> None:
    """All others are over their limit too, and would ask one after the other, each time with everybody's stacks."""
    assert ranks[0].ask() == "1.0"
    for rank in ranks:
        rank.answer()
    ranks[0].give_up("1.0")
    for rank in ranks:
        rank.answer()
        assert rank.in_vain == "1.0"
    assert ranks[0].answers_to("1.0") == {}


def test_who_has_left_is_not_waited_for(ranks: list[Questions]) -> None:
    """A rank that ended well answers nothing any more."""
    ranks[2].notices.put("left_2", "", PATIENCE)
    question = ranks[0].ask()
    assert question is not None
    ranks[1].answer()
    began = time.monotonic()
    answers = ranks[0].gather(question, PATIENCE)
    assert sorted(answers) == [0, 1] and time.monotonic() - began < PATIENCE / 2
    assert ranks[0].left(ranks[0].absent(answers)) == {2: ""}
