"""Fixtures of the end-to-end tests."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
from commandline import Party, Terminal

from potluck.testing.natlab import NatLab, lab_available
from potluck.testing.processes import Children


@pytest.fixture
def needs_lab() -> None:
    """Skip the test, with the reason, where no lab can be built."""
    if (reason := lab_available()) is not None:
        pytest.skip(reason)


@pytest.fixture
def lab(needs_lab: None, tmp_path: Path) -> Iterator[NatLab]:
    """A small internet that exists as long as the test; what its processes write is kept in the test's folder."""
    with NatLab(log_folder=tmp_path) as network:
        yield network


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Party]:
    """One run for all tests that do not disturb each other in it."""
    folder = tmp_path_factory.mktemp("crowd")
    with Children(log_folder=folder) as children:
        yield Party(Terminal(folder, children))


@pytest.fixture
def terminal(tmp_path: Path, children: Children) -> Terminal:
    """Where a test types its commands."""
    return Terminal(tmp_path, children)


@pytest.fixture
def fresh_terminal(tmp_path: Path, children: Children) -> Terminal:
    """Where each command starts as it does for a person: its imports are tested too."""
    return Terminal(tmp_path, children, fresh=True)


@pytest.fixture
def party(crowd: Party, terminal: Terminal) -> Party:
    """The common run, with processes that end with the test."""
    guest = copy.copy(crowd)
    guest.terminal = terminal
    return guest
