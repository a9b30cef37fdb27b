"""Who hangs is found, who works is left alone: else a run of weeks waits for nobody, or is ended for nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.tiny_run import records, tiny_config
from helpers.worlds import run_world
from torch import nn

from miras_megatron.config.check import find_problems
from miras_megatron.config.load import load_run
from miras_megatron.parallel.lost import RankLost
from miras_megatron.parallel.notices import Notices, Unreachable
from miras_megatron.parallel.whereabouts import (
    ON_GPU,
    describe_device_wait,
    describe_place,
    describe_stacks,
    describe_wait,
    main_thread_frame,
)
from miras_megatron.training import build_job, signs, watchdog
from miras_megatron.training.main import main
from miras_megatron.training.roll_call import Finding
from miras_megatron.training.signs import SIGNS, alive, begin_anew, give_signs
from miras_megatron.training.stop import handlers_restored
from miras_megatron.training.stuck_report import Answer, Verdict, summary, write_report
from miras_megatron.training.watchdog import Watchdog, own_error, watched


class Ended(Exception):
    """Stands in for the end of the process."""


def dogs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, limit: float = 1.0) -> list[Watchdog]:
    """The watchdogs of so many ranks, not started; all watch this process's main thread."""

    def leave() -> None:
        raise Ended

    monkeypatch.setattr(watchdog, "_leave", leave)
    monkeypatch.setattr(watchdog, "GRACE", 1.0)
    begin_anew()
    store = dist.HashStore()
    made = [Watchdog(limit, Notices(store, "rank 0"), mesh_of(r, ranks), tmp_path) for r in range(ranks)]
    for dog in made:
        dog.notices.put(f"title_{dog.rank}", dog.title, 1.0)
        dog.watch()
    for dog in made:
        dog._count()
    return made


def mesh_of(rank: int, ranks: int) -> Any:
    """What a watchdog asks of its mesh."""
    cpu = torch.device("cpu")
    return SimpleNamespace(rank=rank, world_size=ranks, name=f"rank {rank} (dp{rank})", device=cpu)


def live(dog: Watchdog) -> None:
    """Ask, then answer until all is decided."""
    with suppress(Ended):
        dog._ask()
        while True:
            dog._answer_questions()


def pass_time(dog: Watchdog, seconds: float) -> None:
    """As if its rank had given no sign for so long."""
    dog.silent = seconds


def test_a_rank_that_waits_for_one_that_moves_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 writes a long checkpoint, rank 1 stands at the barrier: nobody hangs."""
    waiting, moving = dogs(tmp_path, monkeypatch, 2)
    pass_time(waiting, 2.0)
    asks = threading.Thread(target=waiting._ask)
    asks.start()
    while asks.is_alive():
        moving._answer_questions()
    assert waiting.notices.get(["verdict"], 1.0) == [None]
    assert waiting._ask_at > 2.0


def test_where_nobody_moves_the_lowest_rank_writes_and_all_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One file and one summary, not as many as there are ranks."""
    first, second = dogs(tmp_path, monkeypatch, 2)
    for dog in (first, second):
        pass_time(dog, 2.0)
    second.notices.put("ends_1", "", 1.0)
    asks = threading.Thread(target=second._ask)
    asks.start()
    with pytest.raises(Ended):
        while True:
            first._answer_questions()
    asks.join()
    with pytest.raises(Ended):
        second._answer_questions()
    said = capsys.readouterr().err
    assert said.count("no sign of life for 1 s") == 1
    assert "main thread" in (tmp_path / "stuck_step_0.txt").read_text()


def test_ranks_that_are_over_at_once_end_with_one_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step that hangs all are: one that asks and doesn't answer would be taken for dead."""
    three = dogs(tmp_path, monkeypatch, 3)
    for dog in three:
        pass_time(dog, 2.0)
        dog.notices.put(f"ends_{dog.rank}", "", 1.0)
    lives = [threading.Thread(target=live, args=(dog,)) for dog in three]
    for life in lives:
        life.start()
    for life in lives:
        life.join(60)
    text = (tmp_path / "stuck_step_0.txt").read_text()
    assert text.count("main thread:") == 3 and "gave no answer" not in text


def test_a_rank_that_left_with_an_error_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others hang in a collective that it will never join; they would be told that their collectives don't fit."""
    waiting, failed = dogs(tmp_path, monkeypatch, 2)
    failed._thread.start()
    failed.stop("rank 1 (dp1): ValueError: no such token")
    pass_time(waiting, 2.0)
    waiting._ask()
    with pytest.raises(Ended):
        waiting._answer_questions()
    assert "left with an error: rank 1 (dp1): ValueError: no such token" in capsys.readouterr().err
    assert "rank 1 (dp1): ValueError" in (tmp_path / "stuck_step_0.txt").read_text()


def test_the_dead_are_named_before_those_who_fell_over_them() -> None:
    """A rank that leaves since another died isn't what hangs the rest; to name it sends the search the wrong way."""
    assert own_error(KeyError("x"), "rank 2") == "rank 2: KeyError: 'x'"
    verdict = Verdict("1.0", 0, [0], [3], ["rank 1: ValueError: bad"])
    text = summary(9.0, {0: ANSWER}, verdict, ["rank 0", "rank 1", "rank 2", "rank 3"], "there.txt")
    first, second, third, *_ = text.splitlines()
    assert "rank 3 gave no answer" in first and "rank 3" in second and "rank 1: ValueError: bad" in third


def test_a_report_that_cannot_be_told_for_all_is_told_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The store goes while the answers are read: all ranks would end without a word."""
    (dog,) = dogs(tmp_path, monkeypatch, 1)
    pass_time(dog, 2.0)
    dog._ask()

    def gone(question: str) -> None:
        raise Unreachable("no answer")

    monkeypatch.setattr(dog.questions, "answers_to", gone)
    with pytest.raises(Ended):
        dog._answer_questions()
    assert "rank 0 can't ask the others" in capsys.readouterr().err
    assert "main thread:" in (tmp_path / "stuck_step_0.txt").read_text()


def test_a_question_in_vain_keeps_the_others_from_asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody moves: the other five hundred know it too then."""
    first, second, moving = dogs(tmp_path, monkeypatch, 3)
    for dog in (first, second):
        pass_time(dog, 2.0)
    asks = threading.Thread(target=first._ask)
    asks.start()
    while asks.is_alive():
        for dog in (second, moving):
            dog._answer_questions()
    second._answer_questions()
    assert second._ask_at > 2.0


def test_a_rank_that_gives_no_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped, dead, or its machine gone; one that has left well is none of these."""
    living, _, left = dogs(tmp_path, monkeypatch, 3)
    left.notices.put("left_2", "", 1.0)
    pass_time(living, 2.0)
    living._ask()
    with pytest.raises(Ended):
        living._answer_questions()
    assert "rank 1 gave no answer: stopped, dead" in capsys.readouterr().err


def test_time_in_which_the_whole_job_was_suspended_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler stops all processes for hours and lets them go on: every rank would be ended in the first second."""
    (dog,) = dogs(tmp_path, monkeypatch, 1, limit=540.0)
    dog._last -= 10_000.0
    dog._count()
    assert dog.silent < 10.0


def test_the_start_may_take_longer_than_any_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers and large checkpoints do; but its ranks answer, so that one that died there is named."""
    (dog,) = dogs(tmp_path, monkeypatch, 1)
    starting = Watchdog(1.0, dog.notices, mesh_of(0, 1), tmp_path)
    asked = []
    monkeypatch.setattr(Watchdog, "_ask", lambda self: asked.append(self))
    for either in (dog, starting):
        either.start()
        either._seen = SIGNS.count
        pass_time(either, 2.0)
    time.sleep(0.5)
    for either in (dog, starting):
        either._stop.set()
    assert dog in asked and starting not in asked
    assert starting.silent > 2.0, "it is told for how long it gave no sign"


@pytest.mark.parametrize(("rank", "keeper", "stays"), [(0, "rank 0", True), (1, "rank 0", False), (0, "agent", False)])
def test_a_rank_that_lost_another_leaves_as_a_victim_with_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, keeper: str, stays: bool
) -> None:
    """No error of its own is told. SIGTERM, which torchrun sends at once, doesn't end it before it said who died."""
    stayed, store = [], dist.HashStore()

    def find(questions: Any) -> Finding:
        os.kill(os.getpid(), signal.SIGTERM)
        return Finding("no answer from rank 2", [2])

    monkeypatch.setattr(watchdog, "who_is_gone", find)
    monkeypatch.setattr(watchdog, "stay_for_the_others", lambda *given: stayed.append(given))
    mesh = mesh_of(rank, 3)
    mesh.open_notices = lambda: Notices(store, keeper)
    run = load_run(tiny_config(tmp_path))
    with handlers_restored(), pytest.raises(RankLost, match="lost rank 2\nno answer from rank 2$"):
        with watched(run, mesh):
            raise RankLost("rank 0 lost rank 2")
    assert store.get(f"left_{rank}") == b"" and bool(stayed) == stays


def test_whoever_has_lost_a_rank_tells_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves by itself, and the others would wait in vain for the report."""
    leaving, waiting = dogs(tmp_path, monkeypatch, 2)
    leaving._stop.set()
    for dog in (leaving, waiting):
        pass_time(dog, 2.0)
    asks = threading.Thread(target=waiting._ask)
    asks.start()
    while asks.is_alive():
        leaving.questions.answer()
    verdict = leaving.questions.answer()
    assert verdict is not None and (verdict.teller, verdict.answered) == (1, [1])


def test_a_store_that_never_answers_keeps_nobody(tmp_path: Path) -> None:
    """Its keeper may be stopped: the call never returns, and the watchdog would hang with the rank it watches."""

    class Stopped:
        def compare_set(self, name: str, old: str, new: str) -> bytes:
            threading.Event().wait(60)
            return b""

    notices = Notices(Stopped(), "rank 0")
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(Unreachable, match="no answer"):
            notices.swap("question", "", "1.0", 0.1)
        assert time.monotonic() - began < 5


def test_layers_give_signs_forward_and_backward() -> None:
    """A step of hours must be told from one that hangs."""
    begin_anew()
    model = SimpleNamespace(decoder=SimpleNamespace(layers=[nn.Linear(2, 2) for _ in range(3)]))
    give_signs(model)  # type: ignore[arg-type]
    x = torch.ones(1, 2)
    for layer in model.decoder.layers:
        x = layer(x)
    assert SIGNS.count == 3
    x.sum().backward()
    assert SIGNS.count == 6


def test_a_run_gives_signs_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The summary says step, validation or save; and no run is changed by being watched, to the last bit."""
    places: list[str] = []

    class Kept(signs.Signs):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "place" and (not places or places[-1] != value):
                places.append(value)

    monkeypatch.setattr(SIGNS, "__class__", Kept)
    same = {"training__steps": 2, "checkpoint__every": 1, "evaluate__every": 2}
    assert main(tiny_config(tmp_path, "watched", **same, training__watchdog=60)) == 0
    once = ["step 1", "saving a checkpoint", "step 2", "validating", "saving a checkpoint"]
    assert places == ["starting", *once]
    monkeypatch.setattr(build_job, "give_signs", lambda model: None)
    assert main(tiny_config(tmp_path, "alone", **same, training__watchdog=0)) == 0
    watched, alone = records(tmp_path / "watched"), records(tmp_path / "alone")
    assert [(r["loss"], r["grad_norm"]) for r in watched] == [(r["loss"], r["grad_norm"]) for r in alone]
    assert not [thread for thread in threading.enumerate() if thread.name == "watchdog"]


def waits_seen() -> list[str | None]:
    """On two ranks: what a helper thread reads off the main thread's frames while it waits for the other."""
    seen: list[str | None] = []

    def look() -> None:
        time.sleep(1.0)
        seen.append(describe_wait(main_thread_frame()))

    for wait in (dist.all_reduce, dist.broadcast_object_list):
        looker = threading.Thread(target=look)
        if dist.get_rank() == 0:
            looker.start()
        else:
            time.sleep(3.0)
        wait(torch.zeros(1)) if wait is dist.all_reduce else wait([0], src=1)
        if dist.get_rank() == 0:
            looker.join()
        dist.barrier()
    return seen


def test_the_collective_is_read_off_the_frames() -> None:
    """Which of a hundred collectives a rank stands in says which layer or group is wrong."""
    first, second = run_world(2, waits_seen)[0]
    assert first.startswith("all_reduce among ranks 0, 1")
    assert second.startswith("broadcast_object_list among ranks 0, 1")


def test_a_rank_that_computes_waits_for_nobody() -> None:
    """Else the culprit is counted among the victims."""
    seen: list[Any] = []

    def look() -> None:
        frame = main_thread_frame()
        seen.extend([describe_wait(frame), describe_place(frame), describe_stacks()])

    looker = threading.Thread(target=look)
    looker.start()
    looker.join()
    wait, place, stacks = seen
    assert wait is None
    assert "test_a_rank_that_computes_waits_for_nobody" in stacks
    assert place


def test_on_a_gpu_a_rank_waits_wherever_it_asks_for_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its collectives have no frame: every victim would be called a culprit that hangs outside of any collective."""
    idle = [False]
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: SimpleNamespace(query=lambda: idle[0]))
    frame, gpu = main_thread_frame(), torch.device("cuda", 1)
    assert (describe_device_wait(frame, gpu) or "").startswith("what its GPU was given to do, at ")
    idle[0] = True
    assert describe_device_wait(frame, gpu) is None

    def fails(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access\nmore")

    monkeypatch.setattr(torch.cuda, "default_stream", fails)
    assert (describe_device_wait(frame, gpu) or "").startswith("a GPU that fails (CUDA error: an illegal memory")
    assert describe_device_wait(frame, torch.device("cpu")) is None


ANSWER = Answer("rank 0 (dp0), process 1 on one", "step 3", 3, 9.0, True, "all_reduce among ranks 0, 1", "main thread:")
VERDICT = Verdict("1.0", 0, [0, 1], [], [])


def test_all_who_wait_for_each_other_are_told_so() -> None:
    """Collectives that don't fit together have no culprit; to name one would send the search the wrong way."""
    answers = {0: ANSWER, 1: replace(ANSWER, title="rank 1", where="broadcast among ranks 0, 1")}
    text = summary(9.0, answers, VERDICT, ["rank 0", "rank 1"], "there.txt")
    assert "all ranks wait for each other" in text
    assert "waits for all_reduce" in text and "waits for broadcast" in text


def test_gpus_that_are_all_busy_have_no_culprit() -> None:
    """A kernel that never ends looks like a collective that doesn't."""
    busy = replace(ANSWER, where=f"{ON_GPU}, at train_step (step.py:47)")
    text = summary(9.0, {0: busy, 1: busy}, VERDICT, ["rank 0", "rank 1"], "there.txt")
    assert "every rank's GPU is busy: with a collective, or a kernel, that doesn't end" in text


def test_a_report_without_a_folder_is_told_on_the_console(tmp_path: Path) -> None:
    """A run that hangs while it starts has no folder yet, and may get none: it may turn out to be another's."""
    told = write_report(tmp_path / "run", 9.0, {0: ANSWER}, VERDICT, ["rank 0"])
    assert told.startswith("in no file (run.dir isn't there yet)") and "main thread:" in told
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", ["-1", "1e9"])
def test_a_limit_that_is_none_is_refused(tmp_path: Path, value: str) -> None:
    """0 turns it off; below that it would end every run at its first step."""
    run = load_run(tiny_config(tmp_path, training__watchdog=value))
    assert any(line.startswith("training.watchdog = ") for line in find_problems(run))


def test_a_sign_costs_less_than_a_thousandth_of_a_step() -> None:
    """It is given hundreds of times a step."""
    began = time.perf_counter()
    for _ in range(100_000):
        alive()
    assert (time.perf_counter() - began) / 100_000 < 2e-5
