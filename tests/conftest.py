"""Fixtures that every test may use, and the check that a test leaves nothing behind."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from potluck.testing import ports
from potluck.testing.forkserver import FORK_SERVER
from potluck.testing.leaks import Resources, pending_tasks
from potluck.testing.processes import Children
from potluck.testing.smalldisk import CannotMountError, small_disk

os.environ["POTLUCK_NO_DASHBOARD"] = "1"  # hosts that tests start have none, unless a test says otherwise

# Several processes share few cores here: with more threads than that they would wait for each other inside of torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Importing torch takes seconds, in every process that a test starts: they are forked, unless a test or this forbids it.
if not os.environ.get("POTLUCK_TEST_FRESH"):
    FORK_SERVER.open()

# A busy machine is no bug: no test fails because it was slow.
settings.register_profile("potluck", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("potluck")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Spread files over workers by what they cost (filespreading.py)."""
    if config.getvalue("dist") != "loadfile":
        return None
    from filespreading import SpreadFiles

    return SpreadFiles(config, log)


_BEFORE = pytest.StashKey[Resources]()
_FAILED = pytest.StashKey[bool]()


@pytest.fixture
def unused_tcp_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    return ports.unused_tcp_port()


@pytest.fixture
def mount_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Makes a disk of so many bytes; the test is skipped where none can be mounted."""
    with ExitStack() as stack:

        def mount(num_bytes: int) -> Path:
            try:
                return stack.enter_context(small_disk(tmp_path / "disk", num_bytes))
            except CannotMountError as error:
                pytest.skip(str(error))

        yield mount


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    """Real processes that end with the test; what they write is kept beside the test's other files."""
    with Children(log_folder=tmp_path) as running:
        yield running


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Commands that run in this process set up logging: later tests look for lines that would be left out."""
    ours, root = logging.getLogger("potluck"), logging.getLogger()
    level, root_level, handlers = ours.level, root.level, list(root.handlers)
    yield
    if (ours.level, root.level) != (level, root_level):
        ours.setLevel(level)
        root.setLevel(root_level)
        root.handlers[:] = handlers


# A failing test often leaves things behind because it failed: only tests that passed are checked.


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> None:
    """Remember what there is; fixtures of a wider scope are set up already, those of this test come and go."""
    request.node.stash[_BEFORE] = Resources.take()


@pytest.fixture
async def _no_tasks_left(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Check that the test and its fixtures have ended every task that they started."""
    before = frozenset(asyncio.all_tasks())
    yield
    left = [] if request.node.stash.get(_FAILED, False) else await pending_tasks(before)
    assert not left, f"tasks are left pending: {left}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have tests that run in an event loop checked for tasks; first in the list is torn down last."""
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.function):
            item.fixturenames.insert(0, "_no_tasks_left")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Note whether the test failed."""
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Look, when all is torn down, for threads and sockets that the test has left."""
    result = yield
    if _BEFORE in item.stash and not item.stash.get(_FAILED, False):
        left = item.stash[_BEFORE].leaks_since()
        assert not left, f"the test has left behind: {left}"
    return result
