"""If these fail, a value that all else is computed from is wrong, or a resumed run changes its model silently."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from miras_megatron.config.describe import docstrings, list_fields, section_types
from miras_megatron.config.schema import (
    CHANGEABLE_ON_RESUME,
    Data,
    Memory,
    Model,
    Needles,
    Parallel,
    Run,
    Training,
    blend,
    flatten,
    refused_on_resume,
)

ROOT = Path(__file__).resolve().parents[2]


def test_letters_of_blocks_and_patterns() -> None:
    """The layer stack is built from these."""
    assert Model(block="mal", layers=6).letters == "mwmwmw"
    assert Model(pattern="mmw", layers=6).letters == "mmwmmw"
    assert Model(block="mac", layers=3).letters == "ccc"
    assert Model(layers=3).letters == ""


def test_widths() -> None:
    """Papers give these; a wrong rounding changes every count."""
    assert [Model(hidden=h).ffn_width for h in (768, 1024, 1536, 2048)] == [2048, 2752, 4096, 5504]
    assert Model(hidden=96, ffn=100).ffn_width == 100
    assert Model(vocab_size=32001).padded_vocab() == 32064
    assert Model().padded_vocab(256) == 256
    with pytest.raises(ValueError, match=r"model\.vocab_size = null"):
        Model().padded_vocab()


def test_blends_are_weights_and_prefixes() -> None:
    """A blend read wrongly trains on another mixture, and nothing else would show it."""
    assert blend("a b/c") == [(1.0, "a b/c")]
    assert blend(["3 a", "1 b c"]) == [(0.75, "a"), (0.25, "b c")]
    for wrong in (["0 a"], ["-1 a"], [""], []):
        with pytest.raises(ValueError):
            blend(wrong)


def test_splits_are_shares() -> None:
    """A split of documents that is off by a little leaks validation text into training."""
    assert Data(split="99,1,0").split_shares == (0.99, 0.01, 0.0)
    assert Data(split="3,1").split_shares == (0.75, 0.25, 0.0)
    for wrong in ("1,2,3,4", "a,b", "-1,2,3", "0,0,0"):
        with pytest.raises(ValueError):
            _ = Data(split=wrong).split_shares


def test_ranks_and_microbatches() -> None:
    """The divisor of the loss and the length of the schedule hang on these."""
    run = Run(parallel=Parallel(tensor=2, pipeline=2), training=Training(micro_batch=3, global_batch=24))
    assert run.data_ranks(16) == 4
    assert run.micro_batches(16) == 2


def test_every_field_says_what_it_is() -> None:
    """--help and the saved configuration are made from these lines."""
    for info in list_fields():
        assert info.doc and not info.doc.endswith("."), info.name
    assert set(docstrings(Needles)) == {f.name for f in fields(Needles)}


def test_every_field_is_used_outside_the_configuration() -> None:
    """A field that changes nothing is a promise broken in silence."""
    folders = ("miras_megatron", "tools", "launch")
    text = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if "config" not in path.relative_to(ROOT).parts
    )
    schema = (ROOT / "miras_megatron/config/schema.py").read_text(encoding="utf-8")
    check = (ROOT / "miras_megatron/config/check.py").read_text(encoding="utf-8")
    derived = schema + check
    unused = [info.name for info in list_fields() if not _is_read(info.name.rpartition(".")[2], text, derived)]
    assert not unused


def _is_read(field: str, text: str, derived: str) -> bool:
    """Read by name out there, or by a property here that is."""
    return bool(re.search(rf"\b{field}\b", text)) or f"self.{field}" in derived or f"self.model.{field}" in derived


def test_only_listed_fields_may_change_on_resume() -> None:
    """A checkpoint continued as another model gives numbers that mean nothing."""
    saved = Run(model=Model(block="mac"))
    more = replace(saved, training=replace(saved.training, steps=7), logging=replace(saved.logging, every=9))
    assert refused_on_resume(saved, more) == {}
    other = replace(saved, memory=Memory(depth=3), data=Data(needles=Needles(), seed=4))
    refused = refused_on_resume(saved, other)
    assert refused["memory.depth"] == (None, 3)
    assert refused["data.seed"] == (1234, 4)
    assert refused["data.needles.rows"] == (None, 0.5)


def test_the_list_of_changeable_fields_names_fields() -> None:
    """A misspelt entry would refuse what the documentation allows."""
    assert set(CHANGEABLE_ON_RESUME) <= set(flatten(Run())) | set(section_types())
