"""If these fail, a machine that can't train is told to be well, or a broken part hides what else is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from miras_launch import node_facts
from miras_launch.node_facts import Facts, host_names, look, node_name, see_compiler, see_disks, see_versions


def facts() -> Facts:
    return Facts(rank=0, node="here")


def test_a_machine_that_is_well_says_versions_space_and_compiler(tmp_path: Path) -> None:
    """What a person asks first when a run is slow or wrong."""
    seen = facts()
    looks = {"versions": see_versions, "disk": see_disks, "compiler": see_compiler}
    look(seen, local_rank=0, folders=[str(tmp_path / "new")], gpus=0, looks=looks)
    assert seen.faults == [] and seen.versions["torch"].startswith("2.") and seen.versions["python"]
    assert seen.free_gib[str(tmp_path / "new")] > 0


def test_a_missing_torch_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other packages may be missing everywhere."""

    def version(name: str) -> str:
        if name in ("torch", "triton"):
            raise node_facts.metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(node_facts.metadata, "version", version)
    seen = facts()
    see_versions(seen)
    assert [fault.partition(" isn't")[0] for fault in seen.faults] == ["versions: torch"]
    assert seen.versions["triton"] == "none"


def test_a_folder_that_cannot_be_written_is_a_fault(tmp_path: Path) -> None:
    """A full quota or a file in the folder's place shows at the first checkpoint otherwise."""
    (tmp_path / "file").touch()
    seen = facts()
    see_disks(seen, folders=[str(tmp_path / "file")])
    assert seen.faults == [f"disk: {tmp_path / 'file'} can't be written (File exists)"]


@pytest.mark.parametrize(
    ("compiler", "gpus", "faults", "notes"),
    [
        ("false", 0, "compiler: false makes no program that runs: no reason given", ""),
        ("no-such-compiler", 8, "compiler: no-such-compiler isn't there; Triton needs it", ""),
        ("no-such-compiler", 0, "", "compiler: no-such-compiler isn't there"),
    ],
)
def test_a_compiler_that_does_not_work_is_told(
    monkeypatch: pytest.MonkeyPatch, compiler: str, gpus: int, faults: str, notes: str
) -> None:
    """Where there are GPUs nothing runs without it; on CPUs it is slower only."""
    monkeypatch.setenv("CC", compiler)
    seen = facts()
    see_compiler(seen, gpus=gpus)
    assert "".join(seen.faults).startswith(faults) and bool(seen.faults) == bool(faults)
    assert "".join(seen.notes).startswith(notes) and bool(seen.notes) == bool(notes)


def test_a_look_that_breaks_is_a_fault_and_the_others_go_on() -> None:
    """A driver that raises must not hide a full disk."""

    def breaks(facts: Facts, **_: object) -> None:
        raise RuntimeError("CUDA driver error: 999\nmore")

    seen = facts()
    look(seen, local_rank=0, folders=[], gpus=0, looks={"GPUs": breaks, "versions": see_versions})
    assert seen.faults == ["GPUs: RuntimeError: CUDA driver error: 999"] and seen.versions


def test_machines_have_slurms_names() -> None:
    """scontrol and sinfo speak of them by these."""
    assert node_name({"SLURMD_NODENAME": "n7"}) == "n7"
    assert node_name({})
    assert host_names("gpu[003-005,12],login") == ["gpu003", "gpu004", "gpu005", "gpu12", "login"]
    assert host_names("r[1-2]n5") == ["r1n5", "r2n5"] and host_names("") == []
