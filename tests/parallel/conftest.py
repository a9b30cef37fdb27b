"""Ranks keep their process groups from case to case of a file, and let go of them after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.layouts import release_mesh
from helpers.worlds import living_worlds, run_world


@pytest.fixture(scope="module", autouse=True)
def _let_go_of_groups() -> Iterator[None]:
    """Other tests on the same ranks make groups of their own."""
    yield
    for size, backend in living_worlds():
        run_world(size, release_mesh, backend=backend)
