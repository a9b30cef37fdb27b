"""One rank's part of a preflight, step by step, each with a deadline; rank 0 gathers what is found and tells it."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from miras_megatron.config.words import counted
from miras_megatron.parallel.rendezvous import RankInfo

from .meeting import Meeting, all_reduce, door, own_address, see_gpus, unreachable
from .node_facts import Facts, host_names, look, node_name, see_compiler, see_disks, see_versions
from .node_faults import find_faults, find_unreachable, find_unseen

LOOKS: dict[str, Callable[..., None]] = {
    "versions": see_versions,
    "disk": see_disks,
    "compiler": see_compiler,
    "GPUs": see_gpus,
}
"""What a machine's first rank looks at; the others look at their own GPU only."""


@dataclass
class Examination:
    """One rank's part of a preflight; rank 0 gathers what is found and tells it.

    node, looks, collective   this machine, what its first rank looks at, and the sum over all ranks; tests have others
    """

    meeting: Meeting
    wanted: argparse.Namespace
    node: str = field(default_factory=node_name)
    looks: Mapping[str, Callable[..., None]] = field(default_factory=lambda: LOOKS)
    collective: Callable[[Meeting], str] = all_reduce
    nodes: dict[int, str] = field(default_factory=dict)
    """rank -> its machine, of all that came"""
    leaders: list[int] = field(default_factory=list)
    """the first rank of every machine"""
    sign: str = "none"
    """what rank 0 gave to begin: names the folder of marks"""
    faults: list[str] = field(default_factory=list)
    ranks: list[Facts] = field(default_factory=list)

    @property
    def info(self) -> RankInfo:
        """Which rank this is."""
        return self.meeting.info

    def run(self) -> int:
        """Meet; then everybody looks, rank 0 judges and says whether it is worth going on."""
        if not self._meet():
            return self._verdict()
        for step in (self._look, self._share, self._connect, self._sum):
            step()
            if not self._goes_on(step.__name__):
                break
        return self._verdict()

    def _meet(self) -> bool:
        own = [self.node, self.info.local_rank == 0]
        heard = self.meeting.gather("node", own, range(self.info.world_size))
        self.leaders = [rank for rank, (_, first) in sorted(heard.items()) if first]
        self.nodes = {rank: name for rank, (name, _) in heard.items()}
        names = [self.nodes[rank] for rank in self.leaders]
        for rank, name in zip(self.leaders, names, strict=True):  # machines of one image may all have one name
            self.nodes[rank] = name if names.count(name) == 1 else f"{name} (rank {rank})"
        missing = set(range(self.info.world_size)) - heard.keys()
        self._missing(missing, "didn't come")
        return not missing

    def _look(self) -> None:
        """All clocks are read when rank 0 gives the sign; then machines look at themselves."""
        if self.info.rank == 0:
            self.meeting.tell("sign", secrets.token_hex(8))
        self.sign = self.meeting.hear_first("sign") or "none"
        own = Facts(
            rank=self.info.rank,
            node=self.nodes[self.info.rank],
            first=self.info.rank in self.leaders,
            clock=time.time(),
        )
        own_looks = self.looks if own.first else {k: v for k, v in self.looks.items() if k == "GPUs"}
        folders = [folder for folder in (self.wanted.shared, self.wanted.cache) if folder]
        look(own, local_rank=self.info.local_rank, folders=folders, gpus=self.wanted.gpus, looks=own_looks)
        self.meeting.tell("facts", own.plain())
        if self.info.rank == 0:
            heard = self.meeting.hear_all("facts")
            self._missing(self.nodes.keys() - heard.keys(), "didn't end its looking")
            self.ranks = [Facts(**facts) for _, facts in sorted(heard.items())]
            limits = {"gpus": self.wanted.gpus, "free_gib": self.wanted.free_gib, "clock": self.wanted.clock}
            self.faults += find_faults(self.ranks, **limits)

    def _share(self) -> None:
        """Every machine puts a mark into the folder and looks for those of the others."""
        if self.wanted.shared is None or self.info.rank not in self.leaders:
            return
        marks = Path(self.wanted.shared) / f".doctor_{self.sign}"
        with suppress(OSError):
            marks.mkdir(parents=True, exist_ok=True)
            (marks / str(self.info.rank)).touch()
        self.meeting.gather("marked", True, self.leaders)
        heard = self.meeting.gather("seen", _seen(marks, len(self.leaders)), self.leaders)
        with suppress(OSError):
            (marks / str(self.info.rank)).unlink()
            marks.rmdir()  # by the last one
        if self.info.rank == 0:
            self._missing(set(self.leaders) - heard.keys(), "didn't come back from the shared folder")
            named = {self.nodes[rank]: [self.nodes[int(other)] for other in seen] for rank, seen in heard.items()}
            self.faults += find_unseen(named, self.wanted.shared)

    def _connect(self) -> None:
        """Every machine opens a port, and calls all others."""
        if self.info.rank not in self.leaders or len(self.leaders) == 1:
            return
        address = own_address(self.info)
        with door(address) as port:
            doors = self.meeting.gather("door", [address, port], self.leaders)
            others = {self.nodes[rank]: tuple(place) for rank, place in doors.items() if rank != self.info.rank}
            missed_here = unreachable(others, self.meeting.deadline)
            heard = self.meeting.gather("missed", missed_here, self.leaders)
        if self.info.rank == 0:
            self._missing(set(self.leaders) - heard.keys(), "didn't end its calls to the others")
            self.faults += find_unreachable({self.nodes[rank]: missed for rank, missed in heard.items()})

    def _sum(self) -> None:
        self.meeting.tell("sum", self.collective(self.meeting))
        if self.info.rank == 0:
            heard = self.meeting.hear_all("sum")
            self._missing(self.nodes.keys() - heard.keys(), "didn't come back from a sum over all ranks")
            self.faults += [f"{self.nodes[rank]}: rank {rank}: {said}" for rank, said in sorted(heard.items()) if said]

    def _missing(self, ranks: Set[int], what: str) -> None:
        for rank in sorted(ranks):
            home = self.nodes.get(rank) or home_of(rank, self.info)
            self.faults.append(f"{home}: rank {rank} {what} within {self.meeting.deadline:g} s (--deadline)")

    def _goes_on(self, step: str) -> bool:
        """Whether the next step is worth it: what rank 0 says."""
        if self.info.rank == 0:
            self.meeting.tell(f"after{step}", not self.faults)
        return bool(self.meeting.hear_first(f"after{step}"))

    def _verdict(self) -> int:
        """Rank 0 says what was found; nobody leaves before all know, for rank 0 keeps the store."""
        if self.info.rank == 0:
            print("\n".join(report(self.ranks, self.faults, self.info)), flush=True)
            self.meeting.tell("verdict", int(bool(self.faults)))
        verdict = self.meeting.hear_first("verdict")
        if verdict is None:
            print(f"miras-doctor: {self.node}: rank {self.info.rank} heard no verdict of rank 0", file=sys.stderr)
            return 1
        self.meeting.tell("bye", True)
        if self.info.rank == 0:
            self.meeting.hear("bye", list(self.nodes))
        return int(verdict)


def report(ranks: Sequence[Facts], faults: Sequence[str], info: RankInfo) -> list[str]:
    """A line for each machine and each fault, and the verdict."""
    lines = []
    for facts in (facts for facts in ranks if facts.first):
        disks = ", ".join(f"{folder} {free:.0f} GiB free" for folder, free in facts.free_gib.items())
        devices = f"{facts.gpus} x {facts.gpu}" if facts.gpus else "no GPU"
        versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items() if version != "none")
        lines.append(f"{facts.node}: {devices}; {versions}; {disks or 'no folder asked about'}; {facts.seconds:.1f} s")
        lines += [f"{facts.node}: note: {note}" for note in facts.notes]
    lines += [f"FAULT {fault}" for fault in faults]
    machines = len({fault.partition(":")[0] for fault in faults})
    verdict = f"{counted(len(faults), 'fault')} on {counted(machines, 'machine')}" if faults else "nothing found"
    return [*lines, f"miras-doctor: {verdict}; {counted(info.world_size, 'rank')} by {info.launcher}"]


def home_of(rank: int, info: RankInfo, environment: Mapping[str, str] | None = None) -> str:
    """The machine on which Slurm put a rank that never spoke; "?" where nobody knows."""
    env = os.environ if environment is None else environment
    hosts = host_names(env.get("SLURM_STEP_NODELIST", ""))
    number = rank // info.local_size
    return hosts[number] if number < len(hosts) else "?"


def _seen(marks: Path, expected: int, patience: float = 5.0) -> list[str]:
    """The marks in a folder; a network's disk may take a moment to show them."""
    end = time.monotonic() + patience
    while True:
        try:
            seen = sorted(os.listdir(marks))
        except OSError:
            seen = []
        if len(seen) >= expected or time.monotonic() > end:
            return seen
        time.sleep(0.1)
