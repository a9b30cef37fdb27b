"""What a machine says of itself before a run: versions, devices, disks, clock, and whether it can compile."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

PACKAGES = ("miras-megatron", "torch", "megatron-core", "numpy", "triton", "deepspeed")
"""What must be of one version everywhere; what isn't installed anywhere is none."""

SMALLEST_PROGRAM = "int main(void) { return 0; }\n"


@dataclass(kw_only=True)
class Facts:
    """Of one rank; what concerns the machine is looked at by its first one.

    clock      seconds since 1970 when rank 0 gave the sign
    gpus       devices that torch sees, gpu the name of this rank's
    free_gib   folder -> free space, GiB
    seconds    that looking took
    faults     what is wrong with this machine whatever the others have
    notes      what is worth knowing and no fault
    """

    rank: int
    node: str
    first: bool = True
    versions: dict[str, str] = field(default_factory=dict)
    clock: float = 0.0
    gpus: int = 0
    gpu: str = ""
    free_gib: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def plain(self) -> Mapping[str, object]:
        """As JSON can hold it."""
        return asdict(self)


def node_name(environment: Mapping[str, str] | None = None) -> str:
    """What Slurm calls this machine, else its own name."""
    env = os.environ if environment is None else environment
    return env.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def host_names(nodes: str) -> list[str]:
    """The names of a list of Slurm's: "gpu[003-005,12],login" -> gpu003, gpu004, gpu005, gpu12, login."""
    names = []
    for head, body, tail in re.findall(r"([^,\[]+)(?:\[([^\]]*)\]([^,\[]*))?", nodes):
        for part in body.split(",") if body else []:
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            names += [f"{head}{number:0{len(first)}d}{tail}" for number in numbers]
        names += [head] if not body else []
    return names


def look(
    facts: Facts, *, local_rank: int, folders: list[str], gpus: int, looks: Mapping[str, Callable[..., None]]
) -> None:
    """Fill `facts` by `looks`; one that breaks is a fault with its reason, never the end of the others."""
    begun = time.monotonic()
    for name, see in looks.items():
        try:
            see(facts, local_rank=local_rank, folders=folders, gpus=gpus)
        except Exception as error:  # whatever a broken installation raises is what we are here to tell
            first = (str(error).strip().splitlines() or [""])[0][:200]
            facts.faults.append(f"{name}: {type(error).__name__}: {first}")
    facts.seconds = time.monotonic() - begun


def see_versions(facts: Facts, **_: object) -> None:
    """Python's version and the packages'; torch and megatron-core must be there."""
    facts.versions["python"] = platform.python_version()
    for name in PACKAGES:
        try:
            facts.versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts.versions[name] = "none"
    driver = Path("/proc/driver/nvidia/version")
    facts.versions["nvidia driver"] = driver.read_text().splitlines()[0].split("  ")[1] if driver.exists() else "none"
    for name in ("torch", "megatron-core"):
        if facts.versions[name] == "none":
            facts.faults.append(f"versions: {name} isn't installed for {platform.python_implementation()} here")


def see_disks(facts: Facts, *, folders: list[str], **_: object) -> None:
    """Free space of the run's folder and of the cache; both must be writable."""
    for folder in folders:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                facts.free_gib[folder] = shutil.disk_usage(folder).free / 2**30
        except OSError as error:
            facts.faults.append(f"disk: {folder} can't be written ({error.strerror or error})")


def see_compiler(facts: Facts, *, gpus: int, **_: object) -> None:
    """A C compiler makes a program that runs: Triton and the kernel for CPUs need it."""
    words = os.environ.get("CC", "cc").split()
    if shutil.which(words[0]) is None:
        told = facts.faults if gpus else facts.notes
        told.append(f"compiler: {words[0]} isn't there; Triton needs it, on CPUs training goes on slower without")
        return
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "smallest.c", Path(folder) / "smallest"
        source.write_text(SMALLEST_PROGRAM)
        for line in ([*words, str(source), "-o", str(program)], [str(program)]):
            done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
            if done.returncode:
                said = (done.stderr.strip().splitlines() or ["no reason given"])[0]
                facts.faults.append(f"compiler: {' '.join(words)} makes no program that runs: {said}")
                return
