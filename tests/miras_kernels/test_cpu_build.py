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

LOAD = "from miras_kernels.cpu_build import load_cpu_scan; load_cpu_scan()"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, and no kernel from before."""
    monkeypatch.setattr(cpu_build, "load_cpu_scan", load_cpu_scan.__wrapped__)
    monkeypatch.setenv("MIRAS_KERNEL_CACHE", str(tmp_path / "kernels"))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "kernels"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The libraries as they were compiled once for all tests, by name."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIRAS_KERNEL_CACHE", str(folder))
        patch.delenv("CC", raising=False)
        load_cpu_scan.__wrapped__()
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _fill(folder: Path, compiled: dict[str, bytes]) -> list[Path]:
    """The libraries in the test's cache, as a start before this one left them."""
    folder.mkdir(mode=0o700, parents=True)
    for name, whole in compiled.items():
        (folder / name).write_bytes(whole)
        (folder / name).chmod(0o700)
    return [folder / name for name in compiled]


def test_a_second_process_takes_what_the_first_compiled(folder: Path, compiled: dict[str, bytes]) -> None:
    """Ranks and restarts must not compile again, and nothing half-written may lie about."""
    assert len(compiled) == 2 and all(name.endswith(".so") for name in compiled)
    first = {path.name: path.stat().st_mtime_ns for path in _fill(folder, compiled)}
    subprocess.run([sys.executable, "-c", LOAD], check=True, timeout=300)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == first


def test_without_a_compiler_runs_go_on_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster's compute node may have none: it trains all the same, and says why it is slower."""
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert use_cpu_kernel() == "no C compiler found (cc, gcc or clang)"
    assert "cpu" not in KERNELS


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'no space left' >&2\nexit 1", "no space left"),
        ("printf 'caf\\351' >&2\nexit 1", "caf\N{REPLACEMENT CHARACTER}"),
        ("exit 3", "exit status 3"),
        ("exit 0", "exit status 0, but no library was written"),
        ("read line && exit 0\nexit 4", "exit status 4"),
    ],
)
def test_a_compiler_that_fails_is_quoted(
    script: str, said: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk or a broken compiler: its own words, and no file that a later start would take for the kernel.

    Words of another encoding, none at all and a wait for somebody to type are no traceback either.
    """
    broken = tmp_path / "cc"
    broken.write_text(f"#!/bin/sh\n{script}\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    assert use_cpu_kernel() == f"{broken} failed: {said}"
    assert list(folder.iterdir()) == []


def test_a_compiler_may_come_with_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """CC="gcc -m64" is how build scripts say it; it was taken for a file's name and left out without a word."""
    asked: list[list[str]] = []

    def note(command: list[str]) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 1, "", "noted")

    monkeypatch.setattr(cpu_build, "_run", note)
    monkeypatch.setenv("CC", "sh -c 'cc -m64'")
    assert use_cpu_kernel() == "sh -c 'cc -m64' failed: noted"
    assert asked[0][:4] == ["sh", "-c", "cc -m64", "-O3"]


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("/no/such/cc -O2", "CC='/no/such/cc -O2': there is no /no/such/cc; name a C compiler, or unset CC"),
        ("'cc", 'CC="\'cc": No closing quotation'),
    ],
)
def test_a_compiler_that_is_not_there_is_the_reason(named: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one in its place would hide the typing error for ever."""
    monkeypatch.setenv("CC", named)
    assert use_cpu_kernel().startswith(said)


@pytest.mark.parametrize("by", ["MIRAS_KERNEL_CACHE", "XDG_CACHE_HOME"])
def test_a_cache_named_from_here_is_found(
    by: str, tmp_path: Path, compiled: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library loaded by its bare name is sought in the system's folders, not where it lies."""
    monkeypatch.delenv("MIRAS_KERNEL_CACHE")
    monkeypatch.setenv(by, ".")
    here = tmp_path / "here"
    _fill(here if by == "MIRAS_KERNEL_CACHE" else here / "miras_kernels", compiled)
    monkeypatch.chdir(here)
    monkeypatch.setattr(cpu_build, "_compile", _refuse)
    assert use_cpu_kernel() == ""


def _refuse(*args: object) -> None:
    raise AssertionError("compiled again")


def test_a_stored_library_needs_no_compiler(
    folder: Path, compiled: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The login node has a compiler, the compute nodes that share its home don't."""
    _fill(folder, compiled)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert use_cpu_kernel() == ""


def test_a_cache_that_is_a_file_is_named(folder: Path) -> None:
    """The way out is another folder; "File exists" alone says the opposite of what is wrong."""
    folder.touch()
    assert use_cpu_kernel() == f"{folder} is a file; set MIRAS_KERNEL_CACHE to a folder of your own"


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
def test_a_damaged_library_is_never_loaded(damage: str, folder: Path, compiled: dict[str, bytes]) -> None:
    """A cache copied badly or cut off by a full disk ended every run with a signal that nobody can catch."""
    path = _fill(folder, compiled)[0]
    path.write_bytes(_damages()[damage](path.read_bytes()))
    assert cpu_build._stored(folder, path.name.rpartition("-")[0]) is None and not path.exists()


def test_a_library_that_vanishes_is_none(folder: Path) -> None:
    """Ranks that start on a damaged cache remove it under each other's hands: none may stay without the kernel."""
    folder.mkdir(mode=0o700)
    (folder / "cpu_scan-0-1.so").symlink_to("gone")
    assert cpu_build._stored(folder, "cpu_scan-0") is None


def test_a_damaged_library_is_compiled_anew(folder: Path, compiled: dict[str, bytes]) -> None:
    """Whoever meets a broken cache gets the kernel all the same, and leaves a whole one."""
    _fill(folder, compiled)[0].write_bytes(b"damaged")
    cpu_build.load_cpu_scan()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == compiled


def test_a_whole_library_that_is_not_the_kernel_is_no_kernel(tmp_path: Path) -> None:
    """One that lacks a function, or was made from another cpu_scan.c than cpu_scan.py tells of, must not be called."""
    with pytest.raises(NoKernel, match="it has no lane_bytes, kept_elements, .*scan_backward"):
        cpu_build._loaded(Path(torch._C.__file__))
    fake = SimpleNamespace(**{name: lambda: 8 for name in (*cpu_scan.COUNTS, *cpu_scan.WALKS)})
    assert "its Lane has 8 bytes" in cpu_scan.why_unfit(fake)  # type: ignore[arg-type]


def test_two_processes_may_compile_at_once(folder: Path, compiled: dict[str, bytes]) -> None:
    """Ranks start together, on a damaged cache too: all of them get the kernel, and whole files stay."""
    _fill(folder, compiled)[0].write_bytes(b"damaged")
    ranks = [subprocess.Popen([sys.executable, "-c", LOAD]) for _ in range(2)]
    assert [rank.wait(300) for rank in ranks] == [0, 0]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == compiled


def test_the_kernel_is_off_when_not_wanted(folder: Path, compiled: dict[str, bytes]) -> None:
    """training.cpu_kernel: false is how one tells the kernel's share from another fault."""
    _fill(folder, compiled)
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


def test_without_a_home_the_way_out_is_named(
    folder: Path, compiled: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers run as numbers that no passwd file knows."""
    _fill(folder, compiled)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert use_cpu_kernel() == ""
    monkeypatch.delenv("MIRAS_KERNEL_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert use_cpu_kernel() == "Could not determine home directory.; set MIRAS_KERNEL_CACHE to a folder of your own"


def test_a_library_that_others_may_write_to_is_compiled_anew(folder: Path, compiled: dict[str, bytes]) -> None:
    """Linkers leave files open to the group where the umask does."""
    _fill(folder, compiled)[0].chmod(0o722)
    cpu_build.load_cpu_scan()
    assert all(path.stat().st_mode & 0o777 == 0o700 for path in folder.iterdir())
