"""If these failed, a benchmark that was stopped would go on taking the cores that the next one is timed on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

PARENT = """
import os, signal, time
from contextlib import contextmanager
from miras_tools import bench_ranks

@contextmanager
def built(*_):
    yield None

bench_ranks._built = built
bench_ranks.describe = lambda job: {"pid": os.getpid()}
bench_ranks.TASKS = {"step": lambda job: time.sleep(600)}  # no rank looks at its pipe meanwhile

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    with bench_ranks.started([(None, [None, None])]) as (ranks,):
        ready = ranks.ready()
        ranks.ask("step")
        print(*(one["pid"] for one in ready), flush=True)
        ranks.answers()
"""


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "SIGKILL"])
def test_ranks_end_with_the_command_in_the_middle_of_a_step(tmp_path: Path, how: str) -> None:
    """Only the command is told to stop; its ranks hold its output open for as long as they live."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        ranks = [int(word) for word in parent.stdout.readline().split()]
        try:
            assert len(ranks) == 2
            parent.send_signal(getattr(signal, how))
            parent.communicate(timeout=4.0)  # less than the patience with a rank at the end of a good measurement
        except subprocess.TimeoutExpired:
            for rank in ranks:
                with suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)
            pytest.fail(f"{how}: ranks went on after the command was gone")
        finally:
            parent.kill()
