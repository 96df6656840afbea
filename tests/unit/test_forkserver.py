"""Forked children are what fresh interpreters are, and end as they do."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from potluck.testing import forkserver
from potluck.testing.forkserver import ForkedProcess, ForkServer, Template, python_program, start_settings
from potluck.testing.polling import poll_until_sync
from potluck.testing.processes import Children, ManagedProcess

READY_SECONDS = 100.0


@pytest.fixture(scope="module")
def forking() -> Iterator[ForkServer]:
    """A fork server whose templates are ready, for children with one and with two threads."""
    own = ForkServer()
    own.open()
    for threads, num_templates in (("1", forkserver.NUM_TEMPLATES), ("2", 1)):
        settings = start_settings({**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": threads})
        own._templates[settings] = [Template(settings) for _ in range(num_templates)]
        own._asked[settings] = forkserver.PLAIN_STARTS
    for templates in own._templates.values():
        for template in templates:
            poll_until_sync(lambda template=template: template.is_ready, READY_SECONDS, "a template to be ready")
    yield own
    own.close()


@pytest.fixture(autouse=True)
def _in_use(forking: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.testing.processes.FORK_SERVER", forking)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return tmp_path / "program.py"


def start(children: Children, program: Path, code: str, **options: Any) -> ManagedProcess:
    program.write_text(code)
    child = children.spawn([sys.executable, program], env={"OMP_NUM_THREADS": "1"}, **options)
    assert isinstance(child._process, ForkedProcess)
    return child


# What it is

LOOK = """
import gc, json, locale, os, resource, signal, socket, sys, threading
import torch
seen = {
    "name": __name__, "file": __file__, "spec": __spec__ and __spec__.name, "main": sys.modules["__main__"].__name__,
    "is main": sys.modules["__main__"].__dict__ is globals(),
    "argv": sys.argv, "original": sys.orig_argv, "path": sys.path, "flags": str(sys.flags), "cwd": os.getcwd(),
    "environ": sorted(item for item in os.environ.items() if item[0] != "POTLUCK_TEST_CHILD"),
    "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "limits": [resource.getrlimit(number) for number in range(10)],
    "umask": os.umask(0o22),
    "session": os.getsid(0) == os.getpgid(0) == os.getpid(),
    "nice": os.nice(0),
    "descriptors": sorted(name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")),
    "threads": [thread.name for thread in threading.enumerate()],
    "locale": locale.getlocale(),
    "streams": [(stream.encoding, stream.line_buffering, stream.write_through, stream.isatty(), stream.fileno())
                for stream in (sys.stdin, sys.stdout, sys.stderr)],
    "gc": (gc.isenabled(), gc.get_threshold()),
    "switch": sys.getswitchinterval(),
    "recursion": sys.getrecursionlimit(),
    "torch": (torch.get_num_threads(), torch.is_grad_enabled(), str(torch.get_default_dtype())),
    "timeout": socket.getdefaulttimeout(),
    "command": [word for word in open("/proc/self/cmdline").read().split(chr(0)) if word],
    "token": os.environ["POTLUCK_TEST_CHILD"] in open("/proc/self/environ").read(),
}
print(json.dumps(seen))
"""


@pytest.mark.parametrize(("way", "threads"), [("script", "1"), ("package", "2")])
def test_a_forked_child_sees_what_a_fresh_one_sees(children: Children, tmp_path: Path, way: str, threads: str) -> None:
    (tmp_path / "looking").mkdir()
    for path in (tmp_path / "look.py", tmp_path / "looking" / "__main__.py"):
        path.write_text(LOOK)
    (tmp_path / "looking" / "__init__.py").touch()
    words = {"script": [tmp_path / "look.py"], "package": ["-m", "looking"]}[way]
    command = [sys.executable, *words, "one", "two words"]
    environment = {"ADDED": "so", "OMP_NUM_THREADS": threads}
    seen = []
    for fresh in (False, True):
        child = children.spawn(command, env=environment, cwd=tmp_path, fresh=fresh)
        assert isinstance(child._process, ForkedProcess) is not fresh
        seen.append(json.loads(child.check(100)))
    for thing, value in seen[1].items():
        assert seen[0][thing] == value, thing


def test_a_module_that_is_no_package(children: Children, program: Path) -> None:
    program.write_text("import sys; print(__name__, __spec__.name, sys.argv[1:])")
    command = [sys.executable, "-m", "program", "one"]
    child = children.spawn(command, env={"OMP_NUM_THREADS": "1"}, cwd=program.parent)
    assert child.check().strip() == "__main__ program ['one']"
    missing = children.spawn([sys.executable, "-m", "nosuch"], env={"OMP_NUM_THREADS": "1"})
    assert missing.wait() == 1
    assert "No module named nosuch" in missing.output()


def test_randomness_is_each_childs_own(children: Children, program: Path) -> None:
    code = "import random, numpy, torch\nprint(random.random(), numpy.random.random(), torch.initial_seed())"
    drawn = [start(children, program, code).check() for _ in range(3)]
    assert len({word for line in drawn for word in line.split()}) == 9


def test_hashes_of_neighbours_differ(children: Children, program: Path) -> None:
    code = "print(hash('potluck'))"
    assert start(children, program, code).check() != start(children, program, code).check()


# How it ends


@pytest.mark.parametrize(
    ("code", "exit_code", "said"),
    [
        ("print('done')", 0, "done"),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('no such run')", 1, "no such run"),
        ("raise ValueError('on purpose')", 1, "ValueError: on purpose"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("import os; os._exit(7)", 7, ""),
        ("import atexit; atexit.register(print, 'good-bye')", 0, "good-bye"),
        ("import threading\nthreading.Timer(0.1, print, ['a thread ends']).start()", 0, "a thread ends"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV, ""),
    ],
)
def test_ends_are_true(children: Children, program: Path, code: str, exit_code: int, said: str) -> None:
    child = start(children, program, code)
    assert child.wait() == exit_code
    assert said in child.output()


def test_signals_and_standard_input(children: Children, program: Path) -> None:
    code = "import sys\nprint('ready', flush=True)\nfor line in sys.stdin: print('got', line, end='', flush=True)"
    child = start(children, program, code, stdin=True)
    child.wait_for_line("ready")
    child.freeze()
    child.send_line("hello")
    poll_until_sync(lambda: state_of(child.pid) == "T", 30, "the child to be frozen")
    child.thaw()
    child.wait_for_line("got hello")
    child.interrupt()
    assert child.wait() == -signal.SIGINT
    other = start(children, program, code, stdin=True)
    other.kill()
    assert other.exit_code == -signal.SIGKILL


def test_it_computes_with_several_threads(children: Children, program: Path) -> None:
    code = (
        "import torch\ntorch.set_num_threads(2)\nweights = torch.randn(300, 300, requires_grad=True)\n"
        "for _ in range(3): (weights @ weights).sum().backward()\n"
        "torch.optim.Adam([weights]).step()\nprint(weights.grad.isfinite().all().item())"
    )
    assert start(children, program, code).check(60).strip() == "True"


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def is_running(pid: int) -> bool:
    try:
        return state_of(pid) != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_it_leaves_behind_is_found_also_when_forked_without_a_new_program(program: Path, tmp_path: Path) -> None:
    code = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    print('pid', os.getpid(), flush=True)\n"
        "    time.sleep(600)"
    )
    with Children(tmp_path) as children:
        child = start(children, program, code)
        left = int(child.wait_for_line(r"pid (\d+)")[1])
        assert child.wait() == 0
        assert is_running(left)
    assert not is_running(left)


def test_a_folder_that_is_not_there(children: Children, program: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        start(children, program, "", cwd=tmp_path / "nowhere")
    assert start(children, program, "print('and on')").check().strip() == "and on"


# The templates


PARENT = """
import sys, time
from potluck.testing.forkserver import Template
template = Template(())
print("template", template._process.pid, flush=True)
time.sleep(600)
"""


def test_a_template_does_not_outlive_who_started_it(children: Children, program: Path) -> None:
    program.write_text(PARENT)
    parent = children.spawn([sys.executable, program], fresh=True)
    pid = int(parent.wait_for_line(r"template (\d+)")[1])
    parent.kill()
    poll_until_sync(lambda: not is_running(pid), READY_SECONDS, "the template to end")


def test_a_template_that_has_ended_is_reported() -> None:
    template = Template(())
    try:
        template._process.kill()
        template._process.wait()
        with pytest.raises(forkserver.ForkServerError, match="a template has ended with -9"):
            assert template.is_ready
    finally:
        template.close()


def test_the_first_children_are_plain_and_nobody_waits_for_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []

    class Slow:
        is_ready = False

        def __init__(self, settings: object) -> None:
            started.append(settings)

    monkeypatch.setattr(forkserver, "Template", Slow)
    own = ForkServer()
    own.open()
    before = time.monotonic()
    for asked in range(1, 9):
        assert own._ready_template(()) is None
        assert len(started) == min(max(asked - forkserver.PLAIN_STARTS, 0), forkserver.NUM_TEMPLATES)
    assert time.monotonic() - before < READY_SECONDS
    Slow.is_ready = True
    assert own._ready_template(()) is not own._ready_template(())


def test_a_closed_fork_server_forks_nothing() -> None:
    with open(os.devnull, "wb") as output:  # noqa: PTH123
        command = [sys.executable, "-m", "json.tool"]
        for _ in range(forkserver.PLAIN_STARTS + 2):
            assert ForkServer().start(command, env={}, cwd=None, network="", stdin=False, output=output) is None


@pytest.mark.parametrize(
    ("argv", "program"),
    [
        (["PYTHON", "-m", "potluck.cli", "join"], ["PYTHON", "-m", "potluck.cli", "join"]),
        (["PYTHON", "script.py", "-c"], ["PYTHON", "script.py", "-c"]),
        (["BIN/potluck", "join"], ["PYTHON", "BIN/potluck", "join"]),
        (["PYTHON", "-c", "print()"], None),
        (["PYTHON", "-I", "script.py"], None),
        (["PYTHON", "-m"], None),
        (["PYTHON"], None),
        (["/elsewhere/potluck", "join"], None),
        (["nats-server"], None),
    ],
)
def test_which_commands_are_python_programs(argv: list[str], program: list[str] | None) -> None:
    def real(words: list[str]) -> list[str]:
        folder = str(Path(sys.executable).parent)
        return [word.replace("PYTHON", sys.executable).replace("BIN", folder) for word in words]

    assert python_program(real(argv)) == (None if program is None else real(program))
