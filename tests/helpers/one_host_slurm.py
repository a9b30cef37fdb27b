"""A real Slurm on this machine: munged, slurmctld and some slurmd in a folder of their own, and always stopped."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

SETTINGS = """\
ClusterName=miras
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire={requeue_seconds}
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
KillWait=10
MinJobAge=600
RebootProgram=/bin/true
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
"""
"""A requeued job waits until the credential of its start before has expired: here seconds, usually two minutes."""

NODE = "NodeName=n{n} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=2000 State=UNKNOWN\n"
PARTITION = "PartitionName=debug Nodes=n[1-{count}] Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO\n"


class OneHostSlurm:
    """Slurm with `count` nodes n1, n2, .. of four cores, all on this host; `environment` leads its commands there."""

    def __init__(self, folder: Path, count: int, requeue_seconds: int = 5) -> None:
        self.folder, self.count, self.requeue_seconds = folder, count, requeue_seconds
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self, deadline: float = 60.0) -> None:
        """Start everything and wait until all nodes are idle. Raises TimeoutError with the ends of all logs."""
        self.folder.chmod(0o755)
        for name in ("state", "munge", *(f"spool/n{n}" for n in range(1, self.count + 1))):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "slurm.conf").write_text(self._settings())
        self._start_munge()
        self._run("slurmctld", "-D", "-c")
        for n in range(1, self.count + 1):
            self._run("slurmd", "-D", "-N", f"n{n}")
        end = time.monotonic() + deadline
        while self.call("sinfo", "--noheader", "--format=%D %t") != f"{self.count} idle":
            if time.monotonic() > end:
                raise TimeoutError(f"Slurm isn't up after {deadline:.0f} s:\n{self.logs()}")
            time.sleep(0.3)

    def stop(self) -> None:
        """Cancel all jobs and end what was started, whatever state it is in."""
        if len(self._daemons) > 1 and self._daemons[1].poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.call("scancel", "--me")
                self.wait_for(lambda: not self.call("squeue", "--noheader"), 20)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()

    def call(self, *words: str) -> str:
        """The output of one of Slurm's commands, stripped; errors of the command are part of it."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        return (done.stdout + done.stderr).strip()

    def state(self, job: str) -> str:
        """What squeue says of a job: PENDING, RUNNING, COMPLETED, FAILED .."""
        return self.call("squeue", "--noheader", "--states=all", f"--job={job}", "--format=%T")

    def wait_for(self, happened: Callable[[], bool], seconds: float) -> bool:
        """Whether something happened within so many seconds."""
        end = time.monotonic() + seconds
        while not happened():
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
        return True

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        found = sorted(self.folder.glob("*.log")) + sorted(self.folder.glob("munge/*.log"))
        return "\n".join(f"== {path.name}\n" + "\n".join(path.read_text().splitlines()[-15:]) for path in found)

    def _settings(self) -> str:
        host, ports = socket.gethostname().split(".")[0], free_ports(self.count + 1)
        text = SETTINGS.format(host=host, port=ports[0], folder=self.folder, requeue_seconds=self.requeue_seconds)
        text += "".join(NODE.format(n=n, host=host, port=ports[n]) for n in range(1, self.count + 1))
        return text + PARTITION.format(count=self.count)

    def _start_munge(self) -> None:
        """A munge of our own: its key and socket lie here, no service of the machine is touched."""
        home = self.folder / "munge"
        (home / "key").write_bytes(secrets.token_bytes(1024))
        (home / "key").chmod(0o400)
        for path in (home, home / "key"):
            shutil.chown(path, "munge", "munge")
        home.chmod(0o755)
        files = {
            "key-file": "key",
            "socket": "socket",
            "pid-file": "pid",
            "log-file": "munged.log",
            "seed-file": "seed",
        }
        self._run(
            *("setpriv", "--reuid=munge", "--regid=munge", "--clear-groups", "munged", "--foreground"),
            *(f"--{option}={home / name}" for option, name in files.items()),
        )
        if not self.wait_for(lambda: (home / "socket").exists(), 20):
            raise TimeoutError(f"munged made no socket:\n{self.logs()}")

    def _run(self, *words: str) -> None:
        self._daemons.append(
            subprocess.Popen(
                words,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on now."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@contextlib.contextmanager
def slurm_of(count: int) -> Iterator[OneHostSlurm]:
    """A Slurm of `count` nodes inside the block, in a folder of /tmp: munged's user must reach it, by a short path."""
    folder = Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp"))
    slurm = OneHostSlurm(folder, count)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()
        shutil.rmtree(folder, ignore_errors=True)
