"""docs/papers.md is how a reader of a paper finds the code: every name on it must exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = re.findall(
    r"`(?P<path>[\w/]+\.py)(?P<kind>::?)(?P<name>[\w.]+)`|`(?P<file>tests/[\w/]+\.py)`",
    (ROOT / "docs/papers.md").read_text(),
)


def names_in(path: Path) -> set[str]:
    """Top-level names of a module, and methods as Class.method."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [node])
        found |= {name for t in targets if (name := getattr(t, "id", None) or getattr(t, "name", None))}
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{m.name}" for m in node.body if isinstance(m, ast.FunctionDef)}
    return found


def test_the_page_has_rows():
    """A page whose references are not found by the pattern would pass every other test."""
    assert len(ROWS) > 80


@pytest.mark.parametrize("row", sorted(set(ROWS)), ids=lambda row: "".join(row))
def test_every_name_on_the_page_exists(row):
    """A renamed function or test would leave the reader of a paper with nothing."""
    path, kind, name, whole_file = row
    if whole_file:
        assert (ROOT / whole_file).is_file()
        return
    file = ROOT / path if kind == "::" else ROOT / "miras_megatron" / path
    assert name in names_in(file), f"{file.relative_to(ROOT)} has no {name}"
