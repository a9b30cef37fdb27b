"""If these fail, a machine without a compiler can't train, or loads a library that somebody else put there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from miras_kernels import cpu_build, cpu_scan
from miras_kernels.cpu_build import NoKernel, load_cpu_scan
from miras_kernels.cpu_scan import MOST_THREADS

from miras_megatron.layers.backends import use_cpu_kernel
from miras_megatron.memory.fused_lanes import KERNELS


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, and no kernel from before."""
    monkeypatch.setattr(cpu_build, "load_cpu_scan", load_cpu_scan.__wrapped__)
    monkeypatch.setenv("MIRAS_KERNEL_CACHE", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The libraries as they were compiled once for all tests, by name."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIRAS_KERNEL_CACHE", str(folder))
        load_cpu_scan.__wrapped__()
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _fill(folder: Path, compiled: dict[str, bytes]) -> list[Path]:
    """The libraries in the test's cache, as a start before this one left them."""
    folder.mkdir(mode=0o700)
    for name, whole in compiled.items():
        (folder / name).write_bytes(whole)
        (folder / name).chmod(0o700)
    return [folder / name for name in compiled]


def test_a_second_process_takes_what_the_first_compiled(folder: Path) -> None:
    """Ranks and restarts must not compile again, and nothing half-written may lie about."""
    cpu_build.load_cpu_scan()
    first = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert len(first) == 2 and all(name.endswith(".so") for name in first)
    script = "from miras_kernels.cpu_build import load_cpu_scan; load_cpu_scan()"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == first


def test_without_a_compiler_runs_go_on_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster's compute node may have none: it trains all the same, and says why it is slower."""
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert use_cpu_kernel() == "no C compiler found (cc, gcc or clang)"
    assert "cpu" not in KERNELS


def test_a_compiler_that_fails_is_quoted(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk or a broken compiler: its own words, and no file that a later start would take for the kernel."""
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'no space left' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(NoKernel, match="no space left"):
        cpu_build.load_cpu_scan()
    assert list(folder.iterdir()) == []


def test_a_folder_that_others_may_write_to_is_refused(folder: Path) -> None:
    """Whoever can write there could have their code run by us."""
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(NoKernel, match=f"{folder}.*set MIRAS_KERNEL_CACHE"):
        cpu_build.load_cpu_scan()


def _damages() -> dict[str, Callable[[bytes], bytes]]:
    middle = slice(8192, 16384)
    return {
        "no library": lambda whole: b"not a library",
        "empty": lambda whole: b"",
        "cut off": lambda whole: whole[: len(whole) // 2],
        "zeros inside": lambda whole: whole[: middle.start] + bytes(8192) + whole[middle.stop :],
        "another library": lambda whole: Path(torch._C.__file__).read_bytes(),
    }


@pytest.mark.parametrize("damage", _damages())
def test_a_damaged_library_is_compiled_anew(damage: str, folder: Path, compiled: dict[str, bytes]) -> None:
    """A cache copied badly or cut off by a full disk ended every run with a signal that nobody can catch."""
    for path in _fill(folder, compiled):
        path.write_bytes(_damages()[damage](path.read_bytes()))
    script = "from miras_kernels.cpu_build import load_cpu_scan; load_cpu_scan()"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == compiled


def test_a_whole_library_that_is_not_the_kernel_is_no_kernel(tmp_path: Path) -> None:
    """One that lacks a function, or was made from another cpu_scan.c than cpu_scan.py tells of, must not be called."""
    with pytest.raises(NoKernel, match="it has no lane_bytes, kept_elements, .*scan_backward"):
        cpu_build._loaded(Path(torch._C.__file__))
    fake = SimpleNamespace(**{name: lambda: 8 for name in (*cpu_scan.COUNTS, *cpu_scan.WALKS)})
    assert "its Lane has 8 bytes" in cpu_scan.why_unfit(fake)  # type: ignore[arg-type]


def test_two_processes_may_compile_at_once(folder: Path, compiled: dict[str, bytes]) -> None:
    """Ranks start together, on a damaged cache too: all of them get the kernel, and whole files stay."""
    for path in _fill(folder, compiled):
        path.write_bytes(b"damaged")
    script = "from miras_kernels.cpu_build import load_cpu_scan; load_cpu_scan()"
    ranks = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(2)]
    assert [rank.wait(300) for rank in ranks] == [0, 0]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == compiled


def test_the_kernel_is_off_when_not_wanted() -> None:
    """training.cpu_kernel: false is how one tells the kernel's share from another fault."""
    assert use_cpu_kernel() == "" and "cpu" in KERNELS
    assert use_cpu_kernel(False) == "not wanted" and "cpu" not in KERNELS


def test_many_threads_are_told_why_they_go_without() -> None:
    """A start line that names the kernel where it never runs sends people looking elsewhere."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(MOST_THREADS + 1)
        assert use_cpu_kernel() == "it is for at most 2 threads, here are 3; set OMP_NUM_THREADS"
    finally:
        torch.set_num_threads(threads)
    assert "cpu" not in KERNELS


def test_a_full_disk_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that can't be stored is no reason not to train."""

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.mkdtemp", full)
    assert "No space left on device; MIRAS_KERNEL_CACHE names another folder" in use_cpu_kernel()


def test_without_a_home_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers run as numbers that no passwd file knows."""

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert use_cpu_kernel() == ""
    monkeypatch.delenv("MIRAS_KERNEL_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert use_cpu_kernel() == "Could not determine home directory.; set MIRAS_KERNEL_CACHE to a folder of your own"


def test_a_library_that_others_may_write_to_is_compiled_anew(folder: Path, compiled: dict[str, bytes]) -> None:
    """Linkers leave files open to the group where the umask does."""
    for path in _fill(folder, compiled):
        path.chmod(0o722)
    cpu_build.load_cpu_scan()
    assert all(path.stat().st_mode & 0o777 == 0o700 for path in folder.iterdir())
