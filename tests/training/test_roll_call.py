"""A collective that fails names nobody: who is gone is asked, else a cluster's bad machine takes the next run too."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from miras_megatron.parallel.notices import Notices
from miras_megatron.training import roll_call
from miras_megatron.training.questions import Questions
from miras_megatron.training.roll_call import NOBODY, Finding, stay_for_the_others, who_is_gone
from miras_megatron.training.stuck_report import Answer


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Questions]:
    """Four, that meet in one store."""
    monkeypatch.setattr(roll_call, "PATIENCE", 1.0)
    monkeypatch.setattr(roll_call, "LAST", 1.0)
    store, answer = dist.HashStore(), Answer("rank", "step 3", 3, 9.0, True, "all_reduce", "main thread:")
    made = [Questions(Notices(store, "rank 0"), rank, 4, lambda: answer, 1.0, tick=0.05) for rank in range(4)]
    for rank in made:
        rank.notices.put(f"title_{rank.rank}", f"rank {rank.rank} (dp{rank.rank}), process 7 on node8", 1.0)
    return made


@contextmanager
def alive(*ranks: Questions) -> Iterator[None]:
    """Their watchdogs answer, whatever their main threads do."""
    ended = threading.Event()

    def answer(rank: Questions) -> None:
        while not ended.wait(0.02):
            rank.answer()

    threads = [threading.Thread(target=answer, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def at_once(call: Callable[[Questions], Any], *ranks: Questions) -> list[Any]:
    """What `call` returns for each, called by all at the same time."""
    found: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda r=rank: found.update({r.rank: call(r)})) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [found[rank.rank] for rank in ranks]


def test_all_who_lost_a_rank_name_the_one_that_gives_no_answer(ranks: list[Questions]) -> None:
    """Two lost it, one computes and hasn't noticed: neither of these three may be named."""
    with alive(ranks[2]):
        found = at_once(who_is_gone, ranks[0], ranks[1])
    said = "no answer from rank 3 (dp3), process 7 on node8: dead, stopped, or the machine is gone"
    assert found == [Finding(said, [3])] * 2


def test_who_comes_late_is_told_what_was_found(ranks: list[Questions]) -> None:
    """Ranks of a pipeline notice one after the other; to ask again would name those that have left since."""
    with alive(ranks[1], ranks[2]):
        first = who_is_gone(ranks[0])
    ranks[0].notices.put("left_0", "", 1.0)
    assert who_is_gone(ranks[1]) == first


def test_a_question_that_was_in_vain_keeps_nobody_from_asking(ranks: list[Questions]) -> None:
    """A watchdog asks in vain shortly before a collective's limit, and its question would be the last."""
    question = ranks[2].ask()
    assert question is not None
    for rank in ranks:
        rank.answer()
    ranks[2].give_up(question)
    with alive(ranks[1], ranks[2], ranks[3]):
        assert who_is_gone(ranks[0]).text.startswith(NOBODY)


def test_an_asker_that_died_itself_is_not_waited_for_long(ranks: list[Questions]) -> None:
    """It is killed while it calls the roll: the others must still learn who was first."""
    assert ranks[3].ask() is not None
    with alive(ranks[1], ranks[2]):
        assert who_is_gone(ranks[0]).missing == [3]


def test_a_rank_that_left_by_itself_is_not_called_dead(ranks: list[Questions]) -> None:
    """The machine it ran on is well, and so are the ranks that waited for it: its error is what to mend."""
    ranks[3].notices.put("left_3", "rank 3 (dp3): OSError: No space left on device", 1.0)
    with alive(ranks[1], ranks[2]):
        finding = who_is_gone(ranks[0])
    assert finding == Finding("left with an error: rank 3 (dp3): OSError: No space left on device")


def test_where_all_answer_those_that_work_on_are_named(ranks: list[Questions]) -> None:
    """A rank that reads a slow disk beyond parallel.timeout ends the others; they alone know nothing of it."""
    reads = Answer("rank 2 (dp2)", "saving a checkpoint", 3, 61.0, False, "read_plain (plain_files.py:9)", "")
    ranks[2].where = lambda: reads
    with alive(ranks[1], ranks[2], ranks[3]):
        finding = who_is_gone(ranks[0])
    assert finding.text == (
        f"{NOBODY}; at work: rank 2 (dp2) is at read_plain (plain_files.py:9) (saving a checkpoint, "
        "no sign of life for 61 s)"
    )


def test_a_store_that_went_with_its_keeper_names_the_keeper(ranks: list[Questions]) -> None:
    """Rank 0 is killed, and nobody can be asked."""

    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("Connection reset by peer")

    ranks[1].notices = Notices(Gone(), "rank 0")
    assert who_is_gone(ranks[1]).text.startswith("rank 0, which keeps the store")


def test_whoever_keeps_the_store_stays_until_the_others_have_left(ranks: list[Questions]) -> None:
    """Else the finding is gone before it is read; but not for the dead, nor for those that compute on for hours."""
    began = time.monotonic()
    stay_for_the_others(ranks[0], Finding("", [3]))
    assert 1.0 <= time.monotonic() - began < 10
    for rank in (1, 2):
        ranks[rank].notices.put(f"left_{rank}", "", 1.0)
    began = time.monotonic()
    stay_for_the_others(ranks[0], Finding("", [3]))
    assert time.monotonic() - began < 0.9
