"""If these fail, the house has lost its order: a maths file that needs Megatron, a kernel that needs the maths, a
package with rough edges touched from everywhere."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from miras_tools.hf_code import flat_sources

ROOT = Path(__file__).resolve().parents[1]

FOLDERS = {
    "config": ROOT / "miras_megatron/config",
    "memory": ROOT / "miras_megatron/memory",
    "layers": ROOT / "miras_megatron/layers",
    "compat": ROOT / "miras_megatron/compat",
    "parallel": ROOT / "miras_megatron/parallel",
    "model": ROOT / "miras_megatron/model",
    "training": ROOT / "miras_megatron/training",
    "miras_kernels": ROOT / "kernels/miras_kernels",
    "miras_launch": ROOT / "launch/miras_launch",
    "miras_tools": ROOT / "tools/miras_tools",
}

MAY_IMPORT = {
    "config": {"config"},
    "memory": {"memory"},
    "layers": {"layers", "memory", "miras_kernels"},
    "compat": {"compat"},
    "parallel": {"parallel", "compat", "config", "memory", "layers"},
    "model": {"model", "parallel", "compat", "config", "memory", "layers"},
    "training": {"training", "model", "parallel", "compat", "config", "memory", "layers"},
    "miras_kernels": {"miras_kernels"},
    "miras_launch": {"miras_launch", "config", "parallel"},  # of parallel only what needs no torch: see below
    "miras_tools": {
        "miras_tools",
        "training",
        "model",
        "parallel",
        "compat",
        "config",
        "memory",
        "layers",
        "miras_kernels",
    },
}
"""Part -> the parts of ours it may import."""

THIRD_PARTY = {
    "config": {"jsonargparse", "yaml"},
    "memory": {"torch"},
    "layers": {"torch"},
    "miras_kernels": {"torch", "triton"},
    "miras_launch": {"yaml", "torch"},  # torch only in one file, and only where a machine has it: see below
}
"""Part -> all it may import that is neither ours nor Python's."""

ONE_TOUCHER = {
    "megatron.core.parallel_state": {"miras_megatron/parallel/mesh.py"},
    "apex": {"miras_megatron/compat/apex.py"},
    "deepspeed": {"miras_megatron/parallel/zero.py"},
    "mpi4py": {"miras_megatron/parallel/rendezvous.py"},
    "titans_pytorch": {"tools/miras_tools/bench_worker.py"},
}
"""Package -> the only files that may name it."""


def sources() -> Iterator[tuple[str, Path]]:
    for part, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            yield part, path


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(level, dotted name) of every import in a file, `from a import b` as a.b."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.level, f"{node.module}.{alias.name}" if node.module else alias.name


def absolute(part: str, path: Path, level: int, name: str) -> str:
    """The absolute dotted name of an import that may be relative."""
    if level == 0:
        return name
    folder = path.parent
    for _ in range(level - 1):
        folder = folder.parent
    root = FOLDERS[part].parent.parent if FOLDERS[part].parent.name == "miras_megatron" else FOLDERS[part].parent
    return ".".join([*folder.relative_to(root).parts, name])


def part_of(name: str) -> str | None:
    """Which part of ours a dotted name lies in; None for others'."""
    first, *rest = name.split(".")
    if first == "miras_megatron":
        return rest[0] if rest and rest[0] in FOLDERS else "miras_megatron"
    return first if first in FOLDERS else None


def test_nobody_imports_against_the_order() -> None:
    """Otherwise the memory maths can't be read, tested or exported without the framework around it."""
    wrong = []
    for part, path in sources():
        for level, name in imports(path):
            target = part_of(absolute(part, path, level, name))
            if target not in MAY_IMPORT[part] | {None, "miras_megatron"}:
                wrong.append(f"{path.relative_to(ROOT)}: {part} may not import {target} ({name})")
    assert not wrong, "\n".join(wrong)


def test_parts_that_must_stay_light_import_nothing_else() -> None:
    """Otherwise a login node needs torch, or an exported model needs our whole environment."""
    wrong = []
    for part, path in sources():
        for level, name in imports(path):
            first = absolute(part, path, level, name).split(".")[0]
            foreign = part_of(first) is None and first != "miras_megatron" and first not in sys.stdlib_module_names
            if part in THIRD_PARTY and foreign and first not in THIRD_PARTY[part]:
                wrong.append(f"{path.relative_to(ROOT)}: {part} may not import {first}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", ONE_TOUCHER)
def test_each_package_with_rough_edges_has_one_toucher(package: str) -> None:
    """Otherwise its next release breaks us in ten places."""
    files = {
        str(path.relative_to(ROOT))
        for part, path in sources()
        for level, name in imports(path)
        if absolute(part, path, level, name).startswith(package)
        and absolute(part, path, level, name)[len(package) :][:1] in ("", ".")
    }
    assert files <= ONE_TOUCHER[package]


@pytest.mark.parametrize("part", ["memory", "layers"])
def test_the_maths_stays_flat_and_relative(part: str) -> None:
    """An exporter ships these files as siblings of a model file, where absolute names of ours don't exist."""
    assert not [path for path in FOLDERS[part].iterdir() if path.is_dir() and path.name != "__pycache__"]
    wrong = [
        f"{path.name}: {name}"
        for path in FOLDERS[part].glob("*.py")
        for level, name in imports(path)
        if level == 0 and name.split(".")[0] == "miras_megatron"
    ]
    assert not wrong


def test_memory_and_layers_work_flattened_into_one_folder(tmp_path: Path) -> None:
    """If this fails, an exported model can't be loaded where Miras-Megatron isn't installed."""
    package = tmp_path / "exported"
    package.mkdir()
    (package / "__init__.py").touch()
    for name, text in flat_sources().items():
        (package / name).write_text(text, encoding="utf-8")
    modules = sorted(path.stem for path in package.glob("*.py") if path.stem != "__init__")
    script = "import importlib, sys\n"
    script += "".join(f"importlib.import_module('exported.{m}')\n" for m in modules)
    script += (
        "heavy = {'megatron', 'miras_megatron', 'jsonargparse', 'yaml'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr


def test_the_configuration_needs_no_torch() -> None:
    """If this fails, a login node without torch can't check or size a run."""
    script = (
        "import sys; from miras_megatron.config import check, load, sizes; import miras_megatron\n"
        "assert not {'torch', 'numpy', 'megatron'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_launching_needs_no_torch() -> None:
    """If this fails, a login node without torch can't show or submit a job."""
    script = (
        "import importlib, pkgutil, sys\n"
        "for name in ('torch', 'numpy', 'megatron', 'mpi4py'): sys.modules[name] = None\n"
        "import miras_launch\n"
        "for module in pkgutil.iter_modules(miras_launch.__path__):\n"
        "    importlib.import_module('miras_launch.' + module.name)\n"
        "from miras_launch.main import main\n"
        "words = ['configs/runs/debug_cpu.yaml', '--cluster=slurm_cpu', '--training.micro_batch=1', '--dry-run']\n"
        "sys.exit(main(words))"
    )
    path = os.pathsep.join(str(ROOT / name) for name in (".", "launch"))
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    assert "srun" in done.stdout
    touchers = {path.name for part, path in sources() for _, name in imports(path) if is_torch_of_launch(part, name)}
    assert touchers == {"meeting.py"}


def is_torch_of_launch(part: str, name: str) -> bool:
    return part == "miras_launch" and name.split(".")[0] == "torch"


def test_no_code_folder_shadows_a_package() -> None:
    """`kernels`, `tools` and `launch` are others' names too: packages so called would win from the repository root."""
    for folder in ("kernels", "tools", "launch", "configs", "tests"):
        assert not (ROOT / folder / "__init__.py").exists()
