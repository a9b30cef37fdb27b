"""If these fail, a point of a sweep trains another run than the one that its words name."""

from __future__ import annotations

from pathlib import Path

import pytest

from miras_megatron.config.load import load_run
from miras_megatron.config.overrides import with_fields
from miras_megatron.config.schema import Run


def test_fields_are_set_as_a_command_line_sets_them(tmp_path: Path) -> None:
    """Numbers, lists, nulls, a section that was not there, and free-form options."""
    given = {
        "optimizer.lr": "1e-3",
        "data.train": '["0.5 a", "b"]',
        "data.needles.rows": "0.25",
        "memory.options": "{objective: lp, p: 3}",
        "memory.lr_max": "null",
        "training.steps": "7",
    }
    (tmp_path / "run.yaml").write_text("data: {needles: {per_row: 2}}\nmemory: {options: {q: 1}}")
    words = [str(tmp_path / "run.yaml"), *(f"--{name}={text}" for name, text in given.items())]
    base = load_run(words[:1])
    changed = with_fields(base, given)
    assert changed == load_run(words) != base
    assert with_fields(base, {"memory.options.p": "3"}) == load_run([words[0], "--memory.options.p=3"])
    assert changed is not None and changed.model is base.model, "what isn't named stays"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("optimizer.rl", "1"),
        ("optimizer.l", "1"),
        ("optimizer.lr", "fast"),
        ("model.layers", "null"),
        ("optimizer", "{lr: 1}"),
        ("nowhere.lr", "1"),
        ("lr", "1"),
    ],
)
def test_what_a_command_line_would_refuse_is_left_to_it(name: str, text: str) -> None:
    """It tells every problem with its way out; a value of another type must not come through here."""
    assert with_fields(Run(), {name: text}) is None
