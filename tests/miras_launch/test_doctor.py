"""If these fail, a run starts on machines that can't do it, or a sound cluster is refused.

Machines are threads here, which meet in a store; once it is two real ranks.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from miras_launch import doctor, examination, meeting
from miras_launch.examination import Examination, home_of
from miras_launch.meeting import Meeting
from miras_launch.node_facts import Facts

from miras_megatron.parallel.rendezvous import RankInfo


def wanted(**given: Any) -> Any:
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    return doctor._options().parse_args(words)


def well(facts: Facts, **_: object) -> None:
    facts.versions["torch"] = "2.13.0"


def examined(
    ranks: int = 2,
    absent: tuple[int, ...] = (),
    options: Callable[[int], dict[str, Any]] = lambda rank: {},
    deadline: float = 4.0,
    seen: Callable[[Any, int], Any] = lambda store, rank: store,
    **of_rank: Callable[[int], Any],
) -> list[int]:
    """The exit codes of ranks on a machine n0, n1, .. each.

    seen      what a rank takes for the store
    of_rank   rank -> looks, collective
    """
    store, codes = dist.HashStore(), dict[int, int]()

    def part(rank: int) -> None:
        info = RankInfo(rank=rank, world_size=ranks, launcher="test")
        given = {name: choose(rank) for name, choose in of_rank.items()}
        given = {"looks": {"versions": well}, "collective": lambda meeting: ""} | given
        met = Meeting(seen(store, rank), info, deadline)
        codes[rank] = Examination(met, wanted(**options(rank)), node=f"n{rank}", **given).run()

    threads = [threading.Thread(target=part, args=(rank,)) for rank in range(ranks) if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [codes[rank] for rank in range(ranks) if rank not in absent]


def test_machines_that_are_well_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And nothing is left in the shared folder."""
    assert examined(3, options=lambda rank: {"shared": tmp_path}) == [0, 0, 0]
    assert "miras-doctor: nothing found; 3 ranks by test" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_only_rank_0_looks_for_what_all_others_say(tmp_path: Path) -> None:
    """A thousand ranks that each look for a thousand keys keep the store busy for longer than the deadline."""
    looked: list[tuple[int, str]] = []

    class Counted:
        """The store, as one rank sees it."""

        def __init__(self, store: Any, rank: int) -> None:
            self.store, self.rank = store, rank

        def check(self, keys: list[str]) -> bool:
            looked.extend((self.rank, key) for key in keys)
            return bool(self.store.check(keys))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.store, name)

    assert examined(3, options=lambda rank: {"shared": tmp_path}, seen=Counted) == [0, 0, 0]
    asked = {key for rank, key in looked if rank == 1}
    assert asked and all(key.endswith("_0") for key in asked), asked
    assert {"node_2", "marked_1", "seen_2", "door_1", "missed_2"} <= {key for rank, key in looked if rank == 0}


def test_a_machine_with_another_torch_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Every rank ends with 1: the script must not train on the others."""

    def old(facts: Facts, **_: object) -> None:
        facts.versions["torch"] = "2.12.0"

    assert examined(3, looks=lambda rank: {"versions": old if rank == 1 else well}) == [1, 1, 1]
    assert "FAULT n1: versions: torch 2.12.0, where others have 2.13.0" in capsys.readouterr().out


def test_a_wrong_clock_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Its certificates and its files' times are wrong."""

    def late(facts: Facts, **_: object) -> None:
        facts.clock += 3600

    assert examined(3, looks=lambda rank: {"versions": late if rank == 2 else well}) == [1, 1, 1]
    assert "FAULT n2: clock: +3600" in capsys.readouterr().out


def test_a_folder_that_is_not_shared_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint of which every machine keeps its part on its own disk can't be read again."""
    assert examined(3, options=lambda rank: {"shared": tmp_path / ("own" if rank == 2 else "all")}) == [1, 1, 1]
    assert "FAULT n2: shared folder: " in capsys.readouterr().out


def test_a_machine_that_does_not_come_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the deadline, with the name that Slurm gave it."""
    monkeypatch.setenv("SLURM_STEP_NODELIST", "gpu[07-09]")
    assert examined(3, absent=(2,), deadline=1.0) == [1, 1]
    assert "FAULT gpu09: rank 2 didn't come within 1 s" in capsys.readouterr().out
    assert home_of(2, RankInfo(world_size=4, local_size=2), {"SLURM_STEP_NODELIST": "a,b"}) == "b"
    assert home_of(0, RankInfo(), {}) == "?"


def test_a_machine_that_cannot_be_called_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A firewall between two machines stops the first collective for its whole timeout, without a name."""
    real = meeting.socket.create_connection
    monkeypatch.setattr(examination, "own_address", lambda info: f"127.0.0.{info.rank + 1}")

    def firewall(place: tuple[str, int], timeout: float) -> Any:
        if place[0] == "127.0.0.2":
            raise TimeoutError
        return real(place, timeout)

    monkeypatch.setattr(meeting.socket, "create_connection", firewall)
    assert examined(3) == [1, 1, 1]
    assert "FAULT n1: network: n0, n2 can't connect to it" in capsys.readouterr().out


def test_a_sum_that_fails_or_hangs_is_told_with_its_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """NCCL's own error, and a rank that never came back."""
    assert examined(2, collective=lambda rank: lambda meeting: "nccl: unhandled system error" if rank else "") == [1, 1]
    assert "FAULT n1: rank 1: nccl: unhandled system error" in capsys.readouterr().out

    def hangs(meeting: Meeting) -> str:
        time.sleep(3)
        return ""

    assert examined(2, deadline=1.0, collective=lambda rank: hangs if rank else lambda meeting: "") == [1, 1]
    assert "FAULT n1: rank 1 didn't come back from a sum over all ranks within 1 s" in capsys.readouterr().out


def test_a_machine_that_hangs_while_it_looks_at_itself_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A driver that never answers; the others are told, and leave."""

    def hangs(facts: Facts, **_: object) -> None:
        time.sleep(4)

    assert examined(3, deadline=1.0, looks=lambda rank: {"versions": hangs if rank == 1 else well}) == [1, 1, 1]
    assert "FAULT n1: rank 1 didn't end its looking within 1 s" in capsys.readouterr().out


def test_machines_of_one_name_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """Images may all be called localhost."""
    store, codes = dist.HashStore(), []

    def part(rank: int) -> None:
        looks = {"versions": lambda facts, **_: facts.faults.append("broken") if rank else None}
        met = Meeting(store, RankInfo(rank=rank, world_size=2), 4.0)
        codes.append(Examination(met, wanted(), node="box", looks=looks, collective=lambda meeting: "").run())

    threads = [threading.Thread(target=part, args=(rank,)) for rank in range(2)]
    [thread.start() for thread in threads]
    [thread.join(30) for thread in threads]
    assert codes == [1, 1] and "FAULT box (rank 1): broken" in capsys.readouterr().out


def test_two_real_ranks_pass_and_a_full_disk_fails_them(tmp_path: Path) -> None:
    """The command itself under torchrun: gloo's sum, the compiler, the folder."""
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join(str(root / part) for part in (".", "kernels", "launch", "tools"))
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    line += ["-m", "miras_launch.doctor", f"--shared={tmp_path}"]
    for more, code, said in ((["--free-gib=0"], 0, "nothing found; 2 ranks"), (["--free-gib=1e9"], 1, "are wanted")):
        done = subprocess.run(
            [*line, *more],
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == code and said in done.stdout, done.stdout + done.stderr


def test_wrong_variables_of_a_launcher_are_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, as in training."""
    monkeypatch.setenv("RANK", "0")
    assert doctor.main([]) == 2
    assert "miras-doctor: RANK is set but" in capsys.readouterr().err


def test_a_meeting_place_that_is_not_there_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rank that can't reach the others says where they should have been."""
    names = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    assert doctor.main(["--deadline=1"]) == 1
    assert "rank 1 can't meet the others, or lost them, at 127.0.0.1:9" in capsys.readouterr().err


def test_a_machine_without_torch_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A broken image on one machine of a hundred; the others name it as one that didn't come."""
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    assert doctor.main([]) == 1
    assert ": versions: torch can't be imported: " in capsys.readouterr().err


def test_a_rank_0_that_dies_meanwhile_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its store goes with it; no traceback of torch on every other machine."""

    class Gone(dist.HashStore):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer\nframe #0")

    monkeypatch.setattr(Meeting, "join", lambda info, deadline: Meeting(Gone(), info, deadline))
    assert doctor.main([]) == 1
    assert "can't meet the others, or lost them, at 127.0.0.1:0 (Connection reset by peer)" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "x", "1e300"])
@pytest.mark.parametrize("option", ["--deadline", "--free-gib", "--clock", "--gpus"])
def test_a_limit_that_nothing_can_be_held_against_is_refused(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No disk has less than nan GiB free: every machine would pass, whatever is wrong with it."""
    with pytest.raises(SystemExit) as ended:
        doctor.main([f"{option}={value}"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"argument {option}: {value!r} must be a " in said and "number from 0 to 1,000,000,000" in said
