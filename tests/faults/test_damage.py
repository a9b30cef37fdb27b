"""Damage to any file of a checkpoint is noticed before anything is loaded, named, and told with the way out: else a
flipped bit becomes a slightly worse model, or a week's run a traceback."""

from __future__ import annotations

import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import START_DEADLINE, Fault, start_ranks
from helpers.tiny_run import learned, tiny_config

from miras_megatron.config.load import load_run
from miras_megatron.training.checkpoint_folder import complete_checkpoints
from miras_megatron.training.main import main
from miras_megatron.training.run_folder import find_start

pytestmark = pytest.mark.faults

RUN: dict[str, Any] = {"training__steps": 6, "checkpoint__every": 3, "training__micro_batch": 1}

TWO_RANKS_FILES = [
    ".metadata",
    "__0_0.distcp",
    "__1_0.distcp",
    "common.pt",
    "config.yaml",
    "manifest.json",
    "metadata.json",
]


def flip(share: float) -> Callable[[Path], None]:
    """Flip one bit of the byte at `share` of the file."""

    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(share * (len(content) - 1))] ^= 1 << int(8 * share) % 8
        path.write_bytes(content)

    return damage


def cut(share: float) -> Callable[[Path], None]:
    """Keep `share` of the file, at most all but one byte."""

    def damage(path: Path) -> None:
        content = path.read_bytes()
        path.write_bytes(content[: min(int(share * len(content)), len(content) - 1)])

    return damage


DAMAGES: dict[str, Callable[[Path], None]] = {
    **{f"bit at {share:.2f}": flip(share) for share in (0.0, 0.17, 0.33, 0.5, 0.71, 0.9, 1.0)},
    **{f"cut to {share:.2f}": cut(share) for share in (0.0, 0.01, 0.5, 1.0)},
    "missing": Path.unlink,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with checkpoints after steps 3 and 6."""
    folder = tmp_path_factory.mktemp("whole")
    with start_ranks(2, tiny_config(folder, **RUN), folder / "start") as ranks:
        assert ranks.wait(START_DEADLINE) == [0, 0], ranks.said(0)
    return folder / "run"


@pytest.mark.parametrize("name", TWO_RANKS_FILES)
def test_damage_to_any_file_is_named_and_the_checkpoint_before_still_loads(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Bits flipped and bytes cut at several places, an empty and a missing file; the way out is one to be pasted."""
    assert sorted(path.name for path in (whole / "checkpoints" / "step_00000006").iterdir()) == TWO_RANKS_FILES
    run = tmp_path / "run"
    argv = [str(whole / "config.yaml"), f"--run.dir={run}", "--training.steps=7"]
    earlier = str(run / "checkpoints" / "step_00000003")
    for kind, damage in DAMAGES.items():
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(whole, run)
        path = run / "checkpoints" / "step_00000006" / name
        damage(path)
        assert main(argv) == 2, kind
        error = capsys.readouterr().err
        assert error.count("damaged checkpoint") == 1 and str(path) in error, f"{kind}: {error}"
        assert "Traceback" not in error
        way_out = re.search(r"--resume (\S+)$", error.strip())
        assert way_out is not None and way_out[1] == earlier, f"{kind}: {error}"
        assert learned(run) == learned(whole), f"{kind}: records were touched"
    assert main([*argv, "--resume", earlier]) == 0
    assert [step for step, _, _ in learned(run)] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_to_the_pointer_costs_nothing(tmp_path: Path, whole: Path, kind: str) -> None:
    """`latest` says only what the folders' names say too."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    DAMAGES[kind](run / "checkpoints" / "latest")
    assert (
        find_start(load_run([str(whole / "config.yaml"), f"--run.dir={run}"])) == run / "checkpoints" / "step_00000006"
    )


SMALL = 16_000
"""bytes: above what config.yaml takes (10,400 today), below the tensors of a save"""

SIZES = (SMALL, 40_000, 150_000, 350_000)
"""bytes a file may have"""


@pytest.mark.parametrize("limit", SIZES)
def test_a_disk_that_is_full_in_the_middle_of_a_file_leaves_the_checkpoint_before(
    tmp_path: Path, whole: Path, limit: int
) -> None:
    """One message that says what to do; the next start, with room, ends as the run that had room all the time."""
    argv = tiny_config(tmp_path, **RUN)
    with start_ranks(2, [*argv, "--training.steps=3", "--optimizer.decay_steps=6"], tmp_path / "first") as ranks:
        assert ranks.wait(START_DEADLINE) == [0, 0], ranks.said(0)
    with start_ranks(2, argv, tmp_path / "full", largest_file=limit) as ranks:
        codes = ranks.wait(START_DEADLINE)
        said = ranks.said(0) + ranks.said(1)
    check_told(codes, said, tmp_path / "run", "File too large")
    go_on(argv, tmp_path, whole)


def test_records_that_no_longer_fit_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """metrics.jsonl grows at every step, long before the next save tells of a full disk: that was a traceback."""
    argv = tiny_config(tmp_path, training__steps=80, checkpoint__every=1000, logging__memory_every=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, hard))
    try:
        assert main(argv) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    error = capsys.readouterr().err
    assert f"run.dir = {tmp_path / 'run'}: File too large; make room there, and run again to go on" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_is_full_at_any_file_of_a_save_leaves_the_checkpoint_before(
    tmp_path: Path, whole: Path, rank: int
) -> None:
    """From each file of a save on, of either rank, nothing more can be made."""
    argv = tiny_config(tmp_path, **RUN)
    with start_ranks(
        2, [*argv, "--training.steps=3", "--optimizer.decay_steps=6"], tmp_path / "a", counted=True
    ) as ranks:
        assert ranks.wait(START_DEADLINE) == [0, 0], ranks.said(0)
        moments = ranks.moments(rank)["file"]
    for number in range(1, moments + 1, 3):
        with start_ranks(2, argv, tmp_path / f"full{number}", {rank: Fault("file", number, "fill")}) as ranks:
            codes = ranks.wait(START_DEADLINE)
            said, moment = ranks.said(0) + ranks.said(1), ranks.moment()
        if codes == [0, 0]:
            break  # what came after the checkpoint had its name needs no room
        print(f"rank {rank}, full {moment}: {codes}")
        check_told(codes, said, tmp_path / "run", "No space left on device")
    go_on(argv, tmp_path, whole)


def check_told(codes: list[int | None], said: str, run: Path, reason: str) -> None:
    """One rank's message with what to do, and all have ended."""
    assert 2 in codes and set(codes) <= {2, 4}, f"{codes}\n{said}"
    assert f"the checkpoint of step 6 can't be written ({reason})" in said, said
    assert f"{run / 'checkpoints' / 'step_00000003'} stays, run again to go on from it" in said, said
    assert "Traceback" not in said, said
    assert [path.name for path in complete_checkpoints(run)] == ["step_00000003"]


def go_on(argv: list[str], folder: Path, whole: Path) -> None:
    """With room again the run ends as the one that always had it."""
    with start_ranks(2, argv, folder / "again") as ranks:
        assert ranks.wait(START_DEADLINE) == [0, 0], ranks.said(0)
    assert learned(folder / "run") == learned(whole)
    assert [path.name for path in complete_checkpoints(folder / "run")] == ["step_00000003", "step_00000006"]
