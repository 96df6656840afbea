"""Python children that are forked from a process which has torch imported already, instead of importing it again.

Importing torch and Potluck takes 2 to 3 s of a core, and the tests start hundreds of processes. A fork server keeps
templates (`forktemplate.py`), processes that have done these imports and nothing else, and has them fork. What comes
out is a real process: it can be killed, frozen and waited for, and has an exit code, a session and streams of its own.

What an interpreter or a native library reads from its environment when it starts (`OMP_NUM_THREADS`, `PYTHON…`) cannot
be changed in a fork. So there are templates for each set of such settings, started when it is asked for the third time,
and several for each, in turn: peers of a run then differ in the seed of their hashes, as they do in earnest. While a
template is not ready children start in the plain way: nobody waits.

The one of a process is `FORK_SERVER`; it is closed, and all children are plain, until `open` is called.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from potluck.testing import namespaces

START_SETTINGS = (
    "PYTHON",
    "OMP_",
    "MKL_",
    "KMP_",
    "GOMP_",
    "OPENBLAS_",
    "TORCH",
    "PYTORCH",
    "ATEN_",
    "LD_",
    "LC_",
    "LANG",
    "TZ",
)
SCRIPTS = ("potluck",)
PLAIN_STARTS = 2  # with the same settings, before a template pays
NUM_TEMPLATES = 2
ROOM_BYTES = 8192  # for what the command lines and environments of children are longer

Settings = tuple[tuple[str, str], ...]


class ForkServerError(RuntimeError):
    """A template has ended, or does not do what it is for."""


class ForkedProcess:
    """A forked child: the part of `subprocess.Popen` that `ManagedProcess` uses."""

    def __init__(self, template: Template, pid: int, stdin: BinaryIO | None) -> None:
        self.pid = pid
        self.stdin = stdin
        self._template = template
        self._handle = os.pidfd_open(pid)  # the template has not waited for it, so the id is still its own
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._ended_within(0)

    def wait(self, timeout: float) -> int:
        """Wait until it has ended, and return its exit code; TimeoutExpired if it has not."""
        code = self._ended_within(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return code

    def _ended_within(self, seconds: float) -> int | None:
        if self._code is None:
            ended = select.poll()
            ended.register(self._handle, select.POLLIN)
            if ended.poll(seconds * 1000):
                self._code = int(self._template.ask({"reap": self.pid})["code"])
                os.close(self._handle)
        return self._code


class Template:
    """One process that forks; `forktemplate.py` is its program."""

    def __init__(self, settings: Settings) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("")  # the kernel finds a name, which is no file and goes with the socket
            self._address = listener.getsockname()
            self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - open as long as the process runs
            # One thread for BLAS: it starts its threads when it is imported, and then nothing could be forked.
            environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", **dict(settings), "ROOM": "-" * ROOM_BYTES}
            program = ["-m", "potluck.testing.forktemplate", str(listener.fileno()), str(os.getpid()), "-" * ROOM_BYTES]
            self._process = subprocess.Popen(
                [sys.executable, *program],
                env={name: value for name, value in environment.items() if _is_kept(name, settings)},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=(listener.fileno(),),
                start_new_session=True,
            )
        self._is_ready = False
        atexit.register(self.close)

    @property
    def is_ready(self) -> bool:
        """Whether its imports are done; an error if it has ended."""
        if self._process.poll() is not None:
            raise ForkServerError(f"a template has ended with {self._process.returncode}: {self._said()}")
        if not self._is_ready:
            with socket.socket(socket.AF_UNIX) as probe:
                self._is_ready = probe.connect_ex(self._address) == 0
        return self._is_ready

    def fork(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, network: str, stdin: bool, output: int
    ) -> ForkedProcess:
        """Have a child forked that runs this Python program."""
        reading, writing = os.pipe() if stdin else (os.open(os.devnull, os.O_RDONLY), -1)
        pipe = open(writing, "wb") if stdin else None  # noqa: SIM115, PTH123 - the process closes it
        try:
            order = {"argv": list(argv), "env": dict(env), "cwd": cwd, "network": network}
            answer = self.ask(order, [reading, output])
            child = ForkedProcess(self, answer["pid"], pipe)
            if "errno" in answer:
                child.wait(30.0)
                raise OSError(answer["errno"], answer["text"], answer["path"])
        except BaseException:
            if pipe is not None:
                pipe.close()
            raise
        finally:
            os.close(reading)
        return child

    def ask(self, order: dict[str, Any], streams: Sequence[int] = ()) -> dict[str, Any]:
        """Send an order and return the answer."""
        data = json.dumps(order).encode()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._address)
            sent = socket.send_fds(connection, [data], list(streams))
            connection.sendall(data[sent:])
            connection.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
        if not answer:
            raise ForkServerError(f"a template has not answered: {self._said()}")
        return dict(json.loads(answer))

    def close(self) -> None:
        """End it; children of it that are left are not its own to end."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        self._log.close()
        atexit.unregister(self.close)

    def _said(self) -> str:
        return os.pread(self._log.fileno(), 10_000, 0).decode(errors="replace")


class ForkServer:
    """The templates of one process of tests."""

    def __init__(self) -> None:
        self._is_open = False
        self._templates: dict[Settings, list[Template]] = {}
        self._asked: Counter[Settings] = Counter()

    def open(self) -> None:
        """From now on, fork what can be forked."""
        self._is_open = True

    def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | os.PathLike[str] | None,
        network: str,
        stdin: bool,
        output: BinaryIO,
    ) -> ForkedProcess | None:
        """Fork a child that runs this command; None where it has to be started in the plain way."""
        program = python_program(argv)
        template = self._ready_template(start_settings(env)) if self._is_open and program is not None else None
        if program is None or template is None:
            return None
        network_file = str(namespaces.FOLDER / network) if network else ""
        return template.fork(program, env, os.fspath(cwd or Path.cwd()), network_file, stdin, output.fileno())

    def close(self) -> None:
        """End all templates; children that are left stay."""
        self._is_open = False
        for templates in self._templates.values():
            for template in templates:
                template.close()
        self._templates.clear()

    def _ready_template(self, settings: Settings) -> Template | None:
        self._asked[settings] += 1
        if self._asked[settings] <= PLAIN_STARTS:
            return None
        templates = self._templates.setdefault(settings, [])
        if len(templates) < NUM_TEMPLATES:
            templates.append(Template(settings))
        ready = [template for template in templates if template.is_ready]
        return ready[self._asked[settings] % len(ready)] if ready else None


def python_program(argv: Sequence[str]) -> list[str] | None:
    """The command line `python -m module …` or `python script …` that this is; None for anything else.

    `python -c …` is something else: such programs import little, and gain nothing from a process that has it all.
    """
    if Path(argv[0]).parent == Path(sys.executable).parent and Path(argv[0]).name in SCRIPTS:
        return [sys.executable, *argv]
    if argv[0] != sys.executable or len(argv) < 2:
        return None
    if argv[1] == "-m":
        return list(argv) if len(argv) > 2 else None
    return None if argv[1].startswith("-") else list(argv)


def start_settings(env: Mapping[str, str]) -> Settings:
    """What of an environment is read when a process starts."""
    return tuple(sorted((name, value) for name, value in env.items() if name.startswith(START_SETTINGS)))


def _is_kept(name: str, settings: Settings) -> bool:
    return not name.startswith(START_SETTINGS) or name in dict(settings) or name == "OPENBLAS_NUM_THREADS"


FORK_SERVER = ForkServer()
