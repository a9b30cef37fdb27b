"""cpu_scan.c compiled on the machine that runs it, once, and kept in the user's cache.

A C compiler and the BLAS inside PyTorch are all it takes. Nothing else is loaded: a library is named by the digest of
what it was made from, its source, flags and CPU, and by that of its own bytes, which are looked at before they are
loaded: a damaged library would end the process, not fail. It is taken only from a folder that nobody else can write to.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from .cpu_scan import CpuScan, why_unfit

SOURCE = Path(__file__).with_name("cpu_scan.c")
FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math")
# without -fno-tree-pre GCC 12 doesn't vectorise the activations
TUNED: tuple[tuple[str, ...], ...] = (("-march=native", "-fno-tree-pre"), ("-mcpu=native",), ())
"""tried in turn; the last is for any CPU"""
TYPES = {torch.float32: ("-DREAL=float", "-DSINGLE"), torch.float64: ("-DREAL=double",)}
PRODUCTS = {torch.float32: ("sgemm_", ctypes.c_float), torch.float64: ("dgemm_", ctypes.c_double)}
COMPILERS = ("cc", "gcc", "clang")
PATIENCE = 120.0
"""seconds for one call of the compiler"""


class NoKernel(Exception):
    """Why this machine can't have the kernel, in words."""


@functools.cache
def load_cpu_scan() -> CpuScan:
    """The kernel, compiled if need be (seconds). Raises NoKernel."""
    try:
        products = {dtype: _product(dtype) for dtype in TYPES}
        folder, about = _own_folder(), _about()
        libraries = {dtype: _library(folder, defines, about) for dtype, defines in TYPES.items()}
    except OSError as error:
        raise NoKernel(f"{error}; MIRAS_KERNEL_CACHE names another folder for it") from error
    return CpuScan(libraries, products)


def cache_folder() -> Path:
    """Where compiled kernels are kept: MIRAS_KERNEL_CACHE, else miras_kernels in the user's cache. Raises NoKernel.

    Absolute: a library named without a folder would be looked for among the system's.
    """
    if named := os.environ.get("MIRAS_KERNEL_CACHE"):
        return Path(named).absolute()
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise NoKernel(f"{error}; set MIRAS_KERNEL_CACHE to a folder of your own") from error
    return Path(base).absolute() / "miras_kernels"


def _compiler() -> list[str]:
    """The words that call the compiler: those of CC, else the first of COMPILERS that is there. Raises NoKernel."""
    given = os.environ.get("CC", "")
    try:
        words = shlex.split(given)
    except ValueError as error:
        raise NoKernel(f"CC={given!r}: {error}") from error
    if not words:
        words = [name for name in COMPILERS if shutil.which(name)][:1]
        if not words:
            raise NoKernel("no C compiler found (cc, gcc or clang)")
    elif not shutil.which(words[0]):
        raise NoKernel(f"CC={given!r}: there is no {words[0]}; name a C compiler, or unset CC to take cc, gcc or clang")
    return words


def _library(folder: Path, defines: tuple[str, ...], about: str) -> ctypes.CDLL:
    """The library that lies in the folder, which takes no compiler, else one compiled into it."""
    stem = f"cpu_scan-{hashlib.sha256(chr(0).join((about, *defines)).encode()).hexdigest()[:24]}"
    return _stored(folder, stem) or _compile(_compiler(), defines, folder, stem)


def _stored(folder: Path, stem: str) -> ctypes.CDLL | None:
    """A whole library of this name that can be loaded here; damaged ones and others' are removed.

    Nobody writes into a library once it has its name, so what has been looked at is what is loaded.
    """
    for path in sorted(folder.glob(f"{stem}-*.so")):
        try:
            if _is_ours(path) and path.name == _name(stem, path):
                return _loaded(path)
            path.unlink()
        except (OSError, NoKernel):
            continue  # removed by another rank, or whole but not for this machine: of another C library, say
    return None


def _name(stem: str, path: Path) -> str:
    """What a library with this file's bytes is called."""
    return f"{stem}-{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}.so"


def _loaded(path: Path) -> ctypes.CDLL:
    """The library, known to be this kernel. Raises OSError where it can't be loaded, NoKernel where it isn't."""
    library = ctypes.CDLL(str(path))
    if reason := why_unfit(library):
        raise NoKernel(f"{path}: {reason}")
    return library


def _own_folder() -> Path:
    """The cache's folder, made if need be. Raises NoKernel where others may write to it."""
    folder = cache_folder()
    if folder.exists() and not folder.is_dir():
        raise NoKernel(f"{folder} is a file; set MIRAS_KERNEL_CACHE to a folder of your own")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise NoKernel(f"{folder} can't be made: {error}; set MIRAS_KERNEL_CACHE to a folder of your own") from error
    if not _is_ours(folder):
        raise NoKernel(f"{folder} belongs to others or others may write to it; set MIRAS_KERNEL_CACHE to another")
    return folder


def _is_ours(path: Path) -> bool:
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def _about() -> str:
    """What decides about the machine code but a library's type: nodes that share a home may differ in their CPU.

    Of the compiler only what CC says: nodes without one take what another has compiled, and an update of it compiles
    nothing anew. PyTorch isn't linked to; a C library that is too old refuses the file, which is then compiled anew.
    """
    parts = (SOURCE.read_text(encoding="utf-8"), os.environ.get("CC", ""), repr((FLAGS, TUNED)), platform.machine())
    return "\0".join((*parts, _cpu()))


def _cpu() -> str:
    """The CPU's features, as Linux tells them, or nothing: code is then made for any CPU."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")


def _compile(compiler: list[str], defines: tuple[str, ...], folder: Path, stem: str) -> ctypes.CDLL:
    """Into a folder of its own; loaded, then renamed when whole: ranks may compile side by side, and any be killed."""
    error = ""
    for tuned in TUNED if _cpu() else TUNED[-1:]:
        with tempfile.TemporaryDirectory(dir=folder) as own:
            made = Path(own) / "cpu_scan.so"
            done = _run([*compiler, *FLAGS, *tuned, *defines, str(SOURCE), "-o", str(made), "-lm"])
            if done.returncode == 0 and made.is_file():
                made.chmod(0o700)
                library = _loaded(made)
                _store(made, folder / _name(stem, made))
                return library
            silent = f"exit status {done.returncode}" + ("" if done.returncode else ", but no library was written")
            error = error or done.stderr.strip() or silent
    raise NoKernel(f"{shlex.join(compiler)} failed: {error[:2000]}")


def _store(made: Path, target: Path) -> None:
    """Rename, once the bytes are on the disk: after a power cut a library is there and whole, or not there."""
    _sync(made)
    made.replace(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=PATIENCE,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoKernel(f"{command[0]}: {error}") from error


def _product(dtype: torch.dtype) -> int:
    """The address of BLAS's matrix product inside PyTorch, tried on a small one."""
    name, number = PRODUCTS[dtype]
    folder = Path(torch.__file__).with_name("lib")
    for path in sorted(folder.glob("libtorch_cpu.*")):
        found = getattr(ctypes.CDLL(str(path)), name, None)
        if found is not None and _multiplies(found, number):
            address = ctypes.cast(found, ctypes.c_void_p).value
            assert address is not None
            return address
    raise NoKernel(f"this PyTorch has no {name}")


def _multiplies(product: Any, number: Any) -> bool:
    """Whether [[1, 2], [3, 4]] times itself is right."""
    given, out, one, zero = (number * 4)(1, 3, 2, 4), (number * 4)(), number(1), number(0)
    by, no, two = ctypes.byref, ctypes.c_char(b"N"), ctypes.byref(ctypes.c_int64(2))
    product.restype = None
    product(by(no), by(no), two, two, two, by(one), given, two, given, two, by(zero), out, two)
    return list(out) == [7.0, 15.0, 10.0, 22.0]
