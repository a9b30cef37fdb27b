"""One tiny trained run that several tests read and none changes."""

import pytest
from helpers.tiny_run import tiny_config

from miras_megatron.training.main import main


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory):
    """The folder of a finished run of 6 steps with checkpoints after 3 and 6."""
    folder = tmp_path_factory.mktemp("trained")
    changes = {"training__steps": 6, "checkpoint__every": 3, "model__block": "mac", "logging__tensorboard": "true"}
    assert main(tiny_config(folder, **changes)) == 0
    return folder / "run"
