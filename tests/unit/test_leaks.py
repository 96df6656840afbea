from __future__ import annotations

import asyncio
import socket
import sys
import threading
from pathlib import Path

from potluck.testing.leaks import Resources, pending_tasks
from potluck.testing.ports import unused_tcp_port
from potluck.testing.processes import Children


def test_nothing_is_found_where_nothing_is_left() -> None:
    before = Resources.take()
    with socket.socket():
        pass
    worker = threading.Thread(target=list)
    worker.start()
    worker.join()
    assert before.leaks_since(0) == []


def test_a_thread_and_a_socket_are_found() -> None:
    before = Resources.take()
    end = threading.Event()
    worker = threading.Thread(target=end.wait, name="forgotten")
    worker.start()
    with socket.socket() as left:
        found = before.leaks_since(0)
        assert "thread forgotten" in found
        assert [line for line in found if "socket:" in line]
        assert left.fileno() >= 0
    end.set()
    worker.join()
    assert before.leaks_since() == []


async def test_a_pending_task_is_found() -> None:
    forgotten = asyncio.create_task(asyncio.Event().wait(), name="forgotten")
    (found,) = await pending_tasks(tasks_of_the_test(), 0)
    assert "task forgotten" in found
    forgotten.cancel()
    assert await pending_tasks(tasks_of_the_test()) == []


def tasks_of_the_test() -> frozenset[asyncio.Task[object]]:
    """The test's own task and those of its fixtures."""
    return frozenset(task for task in asyncio.all_tasks() if task.get_name() != "forgotten")


def test_ports_are_free_and_given_once() -> None:
    ports = [unused_tcp_port() for _ in range(20)]
    assert len(set(ports)) == 20
    with socket.create_server(("127.0.0.1", ports[0])):
        pass


IMPATIENT = """
from potluck.testing import leaks
leaks.SETTLE_SECONDS = 0.2
"""

LEAKY_TESTS = """
import asyncio, socket, threading

kept = []

def test_tidy(unused_tcp_port):
    with socket.create_server(("127.0.0.1", unused_tcp_port)):
        pass

async def test_tidy_with_a_loop(children):
    await asyncio.create_task(asyncio.sleep(0))

def test_leaky_thread():
    threading.Thread(target=threading.Event().wait, name="forgotten-thread", daemon=True).start()

def test_leaky_socket():
    kept.append(socket.socket())

async def test_leaky_task():
    kept.append(asyncio.create_task(asyncio.Event().wait(), name="forgotten-task"))

def test_failing_and_leaky():
    kept.append(socket.socket())
    assert False, "this one fails by itself"
"""


def test_our_fixtures_fail_each_test_that_leaves_something(children: Children, tmp_path: Path) -> None:
    own_conftest = Path(__file__).parents[1] / "conftest.py"
    (tmp_path / "conftest.py").write_text(own_conftest.read_text() + IMPATIENT)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n"
    )
    (tmp_path / "test_leaky.py").write_text(LEAKY_TESTS)
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", str(tmp_path)]
    run = children.spawn(argv, cwd=tmp_path, fresh=True)
    assert run.wait(90) == 1
    report = run.output()
    assert "5 passed, 1 failed, 3 errors" in report.replace("1 failed, 5 passed", "5 passed, 1 failed"), report
    for leak in ("thread forgotten-thread", "descriptor socket:", "task forgotten-task"):
        assert leak in report
    for name in ("test_leaky_thread", "test_leaky_socket", "test_leaky_task"):
        assert f"ERROR test_leaky.py::{name}" in report
    assert "FAILED test_leaky.py::test_failing_and_leaky" in report
