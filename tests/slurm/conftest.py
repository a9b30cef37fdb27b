"""One Slurm of two nodes for all tests of this folder, and jobs that tell how they are getting on."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator

import pytest
from helpers.one_host_slurm import OneHostSlurm, slurm_of


@pytest.fixture(scope="session")
def slurm() -> Iterator[OneHostSlurm]:
    """Two nodes of four cores, stopped whatever happens."""
    with slurm_of(2) as running:
        yield running


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A line when a test begins and ends: jobs take a minute or two each."""
    say, begun = item.config.pluginmanager.getplugin("terminalreporter").write_line, time.monotonic()
    say(f"{time.strftime('%H:%M:%S')} {item.name} ..")
    done = yield
    say(f"{time.strftime('%H:%M:%S')} {item.name}: {time.monotonic() - begun:.0f} s")
    return done
