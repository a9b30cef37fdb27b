"""Folders are whole or absent, whatever happens while they are written."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from miras_tools.new_folder import new_folder, refuse_occupied, refuse_small_disk


def test_a_good_end_gives_the_folder_its_name(tmp_path):
    """Also where an empty folder of that name waits already, and where folders above it are missing."""
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "empty", tmp_path / "deep" / "new"):
        with new_folder(target, "FOLDER", "file") as folder:
            (folder / "file").write_text("x")
            assert not (target / "file").exists()
        assert [path.name for path in target.iterdir()] == ["file"]
        assert [path.name for path in target.parent.iterdir() if path.name.startswith(".")] == []


def test_an_empty_folder_that_cannot_be_replaced_is_filled(tmp_path, monkeypatch):
    """A link to one, or the one a shell stands in: a rename over it fails, after an hour of writing."""
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to("far")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for target in (tmp_path / "link", Path(".")):
        with new_folder(target, "FOLDER", "file") as folder:
            (folder / "file").write_text("x")
            (folder / "deep").mkdir()
        assert sorted(path.name for path in target.iterdir()) == ["deep", "file"]
    assert sorted(os.listdir(tmp_path)) == ["far", "here", "link"] and sorted(os.listdir(tmp_path / "here")) == [
        "deep",
        "file",
    ]


def test_an_empty_folder_stays_empty_after_a_bad_end(tmp_path, monkeypatch):
    """Also where it ends between two of the files that are moved to their places."""
    rename, count = os.rename, iter(range(9))

    def fails_at_the_second(old, new):
        if next(count) == 1:
            raise OSError(errno.EIO, "Input/output error")
        rename(old, new)

    monkeypatch.setattr(os, "rename", fails_at_the_second)
    with pytest.raises(ValueError, match="Input/output error"), new_folder(tmp_path, "FOLDER", "file") as folder:
        for name in "abc":
            (folder / name).write_text("x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("move", [1, 2, 3, 4])
def test_what_a_kill_leaves_in_an_empty_folder_is_not_taken_for_a_whole(tmp_path, monkeypatch, move):
    """No cleaning up follows a kill between two of the files that are moved to their places: the file that says what
    they are isn't among them, or a model without its tokenizer is used as if it were whole."""
    rename, count = os.rename, iter(range(1, 9))

    def killed(old, new):
        if next(count) == move:
            os._exit(9)
        rename(old, new)

    monkeypatch.setattr(os, "rename", killed)
    if not (child := os.fork()):
        with new_folder(tmp_path, "FOLDER", last="config") as folder:
            for name in ("a", "config", "model", "tokenizer"):
                (folder / name).write_text("x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not (tmp_path / "config").exists()
    assert len([path for path in tmp_path.iterdir() if path.is_file()]) == move - 1


def test_two_that_find_one_folder_empty_do_not_mix_their_files(tmp_path, monkeypatch):
    """Shards of one checkpoint beside the index of another are a model that nobody trained."""
    make = tempfile.mkdtemp

    def beside_another(**options):
        (tmp_path / ".other.part").mkdir()
        return make(**options)

    monkeypatch.setattr(tempfile, "mkdtemp", beside_another)
    with pytest.raises(ValueError, match=r"holds '\.other\.part'"), new_folder(tmp_path, "FOLDER", "file"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [".other.part"]


def test_a_link_to_nothing_is_refused_before_anything_is_written(tmp_path):
    """No folder can get its name."""
    (tmp_path / "link").symlink_to("gone")
    with (
        pytest.raises(ValueError, match="a link to a folder that isn't there"),
        new_folder(tmp_path / "link", "FOLDER", "file"),
    ):
        pass


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("bad"), OSError(errno.ENOSPC, "No space left")])
def test_a_bad_end_leaves_nothing(tmp_path, error):
    """Half an export looks like a whole one to whoever loads it next week."""
    with pytest.raises(ValueError if isinstance(error, OSError) else type(error)) as told:
        with new_folder(tmp_path / "target", "FOLDER", "file") as folder:
            (folder / "file").write_text("x")
            raise error
    assert not list(tmp_path.iterdir())
    if isinstance(error, OSError):
        assert "FOLDER" in str(told.value) and "No space left" in str(told.value)


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    """Another model's files would mix with these."""
    (tmp_path / "kept").write_text("x")
    with pytest.raises(ValueError, match="FOLDER = .* is not empty"), new_folder(tmp_path, "FOLDER", "file"):
        pass
    assert (tmp_path / "kept").read_text() == "x"
    with pytest.raises(ValueError, match="is a file"), new_folder(tmp_path / "kept", "FOLDER", "file"):
        pass


def test_a_small_disk_is_known_before_anything_is_written(tmp_path, monkeypatch):
    """Otherwise an hour of writing ends where a look would have told."""
    measured = []
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda place: measured.append(place) or real(place))
    refuse_small_disk(tmp_path / "a" / "b", "FOLDER", 1)
    refuse_small_disk(tmp_path, "FOLDER", 1)  # it may be a disk of its own
    assert measured == [tmp_path, tmp_path]
    with pytest.raises(ValueError, match="MiB are free"):
        refuse_small_disk(tmp_path / "a" / "b", "FOLDER", 1 << 60)


KILLED = """
import sys, time
from pathlib import Path
from miras_megatron.training.main import one_message
from miras_tools.new_folder import new_folder

def work():
    with new_folder(Path(sys.argv[1]), "FOLDER", "file") as part:
        (part / "half").write_text("half a model")
        print("writing", flush=True)
        time.sleep(60)
    return 0

sys.exit(one_message("miras-test", work))
"""


def test_a_scheduler_that_ends_the_job_leaves_nothing_half_written(tmp_path):
    """Hidden gigabytes beside the target would fill a shared disk that nobody looks into."""
    words = [sys.executable, "-c", KILLED, str(tmp_path / "model")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout.readline() == "writing\n"
        assert [path.suffix for path in tmp_path.iterdir()] == [".part"]
        writer.send_signal(signal.SIGTERM)
        assert writer.wait(30) == 143
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["n" * 255, "é" * 127, "名" * 85])
def test_names_as_long_as_a_disk_takes_are_taken(tmp_path, name):
    """Names that list every setting of an experiment come near to it; the hidden folder's is longer."""
    with new_folder(tmp_path / name, "FOLDER", "file") as folder:
        (folder / "file").write_text("x")
    assert os.listdir(tmp_path) == [name]


def test_what_keeps_a_folder_from_being_empty_is_named(tmp_path):
    """A hidden folder that a killed export left in it is nothing `ls` shows."""
    (tmp_path / ".model.x.part").mkdir()
    with pytest.raises(ValueError, match=r"holds '\.model\.x\.part'"):
        refuse_occupied(tmp_path, "FOLDER")
