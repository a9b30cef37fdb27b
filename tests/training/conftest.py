"""One tiny trained run that several tests read and none changes; a slow disk that the watchdog looks at."""

import time

import pytest
from helpers.tiny_run import tiny_config

from miras_megatron.training import watchdog
from miras_megatron.training.main import main


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory):
    """The folder of a finished run of 6 steps with checkpoints after 3 and 6."""
    folder = tmp_path_factory.mktemp("trained")
    changes = {"training__steps": 6, "checkpoint__every": 3, "model__block": "mac", "logging__tensorboard": "true"}
    assert main(tiny_config(folder, **changes)) == 0
    return folder / "run"


@pytest.fixture
def slow_under_watch(monkeypatch):
    """Make a method take 0.2 s more; the fields of a run with which the watchdog ends what takes 4 s. It must not."""
    ended = []
    monkeypatch.setattr(watchdog, "_leave", lambda: ended.append("by the watchdog"))

    def make_slow(owner, name):
        plain = getattr(owner, name)

        def slowly(*args):
            time.sleep(0.2)
            return plain(*args)

        monkeypatch.setattr(owner, name, slowly)
        return {"training__watchdog": 4, "parallel__timeout": 60}

    yield make_slow
    assert not ended
