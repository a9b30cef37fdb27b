"""A tiny trained run of every block, its export, and what is built on them; read by several tests, changed by none."""

import pytest
from helpers.tiny_run import tiny_config
from miras_tools.to_hf import main as to_hf

from miras_megatron.training.main import main as train

LAYERS = {"model__block": "null", "model__pattern": "mcgwa", "model__layers": 5}


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The folder of a finished run of two steps: all five letters, embeddings untied, 257 tokens padded to 320 rows."""
    folder = tmp_path_factory.mktemp("trained")
    argv = tiny_config(folder, **LAYERS, model__tie_embeddings="false", training__steps=2, checkpoint__every=2)
    assert train(argv) == 0
    return folder / "run"


@pytest.fixture(scope="session")
def exported(trained, tmp_path_factory):
    """`trained`, exported into several shards, unchecked."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    assert to_hf([str(trained), str(folder), "--no-check", "--max-shard-size", "20KB"]) == 0
    return folder
