"""Real child processes for tests: their output, signals, and an end that is certain.

Each process starts in a session of its own, writes to a file (so it never blocks on a full pipe, and no thread has to
read), and carries a token in its environment. `close` kills the process and its group, and then, by that token, every
descendant that has moved to another session: nothing survives the test that started it.

Python programs are forked from a process that has torch imported (`forkserver.py`), which spares seconds for each.
Where the start itself is tested, `fresh=True` asks for an interpreter of its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from potluck.testing import namespaces
from potluck.testing.forkserver import FORK_SERVER, ForkedProcess
from potluck.testing.polling import ConditionNotMetError, poll_until, poll_until_sync

TOKEN_VARIABLE = "POTLUCK_TEST_CHILD"
TAIL_BYTES = 4000
END_SECONDS = 10.0  # a killed process has this long to go; the kernel is slow only when a device hangs


class ChildError(AssertionError):
    """A child process did not do what the test needs; the message ends with the tail of its output."""


class ManagedProcess:
    """A child process that a test talks to by signals, standard input and what it writes."""

    def __init__(
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        name: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        log_path: Path | None = None,
        stdin: bool = False,
        network: str = "",
        fresh: bool = False,
    ) -> None:
        """Start it. `env` is added to this process's environment; `stdin` opens a pipe for `send_line`.

        `network` names the network namespace that it runs in; `fresh` starts a Python program in a new interpreter.
        """
        self.argv = [os.fspath(word) for word in argv]
        self.name = name or Path(self.argv[0]).name
        self._token = secrets.token_hex(16)
        self._log: BinaryIO = log_path.open("a+b") if log_path else tempfile.TemporaryFile("a+b")  # noqa: SIM115
        self._closed = False
        self._last_tail = ""
        try:
            whole_env = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {}), TOKEN_VARIABLE: self._token}
            self._process = self._start(whole_env, cwd, stdin, network, fresh)
        except BaseException:
            self._log.close()
            raise

    def _start(
        self, env: dict[str, str], cwd: str | os.PathLike[str] | None, stdin: bool, network: str, fresh: bool
    ) -> subprocess.Popen[bytes] | ForkedProcess:
        if not fresh:
            forked = FORK_SERVER.start(self.argv, env=env, cwd=cwd, network=network, stdin=stdin, output=self._log)
            if forked is not None:
                return forked
        return subprocess.Popen(
            namespaces.exec_argv(network, self.argv) if network else self.argv,
            env=env,
            cwd=cwd,
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The process id, also that of its group and session."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    # What it wrote

    def mark(self) -> int:
        """Where its output ends now; pass it as `since` to look only at what comes later."""
        return os.fstat(self._log.fileno()).st_size

    def output(self, *, since: int = 0) -> str:
        """Return what it has written so far to standard output and standard error."""
        return os.pread(self._log.fileno(), max(self.mark() - since, 0), since).decode(errors="replace")

    def tail(self) -> str:
        """Return the end of its output, for messages; it is kept when the process has been closed."""
        if self._closed:
            return self._last_tail
        return self.output(since=max(self.mark() - TAIL_BYTES, 0))

    def find_line(self, pattern: str, *, since: int = 0) -> re.Match[str] | None:
        """Find the first whole line in which the pattern occurs."""
        wanted = re.compile(pattern)
        complete, _, _ = self.output(since=since).rpartition("\n")
        return next((match for line in complete.split("\n") if (match := wanted.search(line))), None)

    def wait_for_line(self, pattern: str, deadline_seconds: float = 30.0, *, since: int = 0) -> re.Match[str]:
        """Wait until it has written a line in which the pattern occurs; fail at once if it ends without."""
        with self._explained():
            return poll_until_sync(
                lambda: self._line_or_end(pattern, since), deadline_seconds, f"a line with {pattern!r} from {self.name}"
            )

    async def until_line(self, pattern: str, deadline_seconds: float = 30.0, *, since: int = 0) -> re.Match[str]:
        """Wait as `wait_for_line` does, without blocking the event loop."""
        with self._explained():
            return await poll_until(
                lambda: self._line_or_end(pattern, since), deadline_seconds, f"a line with {pattern!r} from {self.name}"
            )

    def send_line(self, line: str) -> None:
        """Write one line to its standard input."""
        if self._process.stdin is None:
            raise ValueError(f"{self.name} was started without standard input; start it with stdin=True")
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    # How it ends

    def wait(self, deadline_seconds: float = 30.0) -> int:
        """Wait until it has ended, and return its exit code."""
        try:
            return self._process.wait(deadline_seconds)
        except subprocess.TimeoutExpired:
            raise self._error(f"still runs after {deadline_seconds:g} s") from None

    async def until_exit(self, deadline_seconds: float = 30.0) -> int:
        """Wait as `wait` does, without blocking the event loop."""
        with self._explained():
            await poll_until(lambda: self.exit_code is not None, deadline_seconds, f"{self.name} to end")
        return self.wait(0)

    def check(self, deadline_seconds: float = 30.0) -> str:
        """Wait until it has ended, fail unless it did so with exit code 0, and return its output."""
        if self.wait(deadline_seconds) != 0:
            raise self._error("failed")
        return self.output()

    def send_signal(self, signum: signal.Signals, *, group: bool = False) -> None:
        """Send a signal to the process, or to its whole group; fail if it has ended already."""
        if self.exit_code is not None:
            raise self._error(f"cannot get {signum.name}: it has ended")
        # Not yet waited for, so the id cannot have been given to another process.
        if group:
            os.killpg(self.pid, signum)
        else:
            os.kill(self.pid, signum)

    def kill(self, *, group: bool = False, deadline_seconds: float = END_SECONDS) -> None:
        """End it with SIGKILL, as a crash would, and wait until it is gone."""
        self.send_signal(signal.SIGKILL, group=group)
        self.wait(deadline_seconds)

    def interrupt(self) -> None:
        """Press Ctrl-C: SIGINT to the whole group, as a terminal sends it."""
        self.send_signal(signal.SIGINT, group=True)

    def freeze(self) -> None:
        """Stop it with SIGSTOP: its connections stay open, but nothing moves."""
        self.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on with SIGCONT."""
        self.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End it, its group, and its descendants wherever they went. May be called again."""
        if self._closed:
            return
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        if self.exit_code is None:
            self.send_signal(signal.SIGKILL, group=True)
            self.wait(END_SECONDS)
        kill_descendants(self._token)
        self._last_tail = self.tail()
        self._closed = True
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "running" if (code := self.exit_code) is None else f"ended with {code}"
        return f"<ManagedProcess {self.name} pid={self.pid} {state}>"

    def _line_or_end(self, pattern: str, since: int) -> re.Match[str] | None:
        ended = self.exit_code is not None  # asked first: what it wrote last is in the file by then
        found = self.find_line(pattern, since=since)
        if ended and not found:
            raise self._error(f"ended without writing a line with {pattern!r}")
        return found

    def _error(self, what: str) -> ChildError:
        state = "it runs" if (code := self.exit_code) is None else f"exit code {code}"
        return ChildError(
            f"{self.name} {what} ({state}, pid {self.pid}, {' '.join(self.argv)})\nend of its output:\n{self.tail()}"
        )

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except ConditionNotMetError as error:
            raise self._error(f"is not there yet: {error}") from None


class Children:
    """The processes of one test, ended together; the `children` fixture."""

    def __init__(self, log_folder: Path | None = None) -> None:
        self._log_folder = log_folder
        self._processes: list[ManagedProcess] = []

    def spawn(
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        name: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        stdin: bool = False,
        network: str = "",
        fresh: bool = False,
    ) -> ManagedProcess:
        """Start a process that ends at the latest with the test; the arguments are those of `ManagedProcess`."""
        log_path = None
        if self._log_folder is not None:
            log_path = self._log_folder / f"{len(self._processes):03d}-{name or Path(argv[0]).name}.log"
        process = ManagedProcess(
            argv, name=name, env=env, cwd=cwd, log_path=log_path, stdin=stdin, network=network, fresh=fresh
        )
        self._processes.append(process)
        return process

    def close(self) -> None:
        """End them all, the newest first, even if one of them resists."""
        with contextlib.ExitStack() as stack:
            for process in self._processes:
                stack.callback(process.close)
        self._processes.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def spawn(
    argv: Sequence[str | os.PathLike[str]],
    *,
    name: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    log_path: Path | None = None,
    stdin: bool = False,
    fresh: bool = False,
) -> ManagedProcess:
    """Start a process outside a fixture; use it as a context manager, so that it ends for sure."""
    return ManagedProcess(argv, name=name, env=env, cwd=cwd, log_path=log_path, stdin=stdin, fresh=fresh)


def kill_descendants(token: str, variable: str = TOKEN_VARIABLE) -> None:
    """Kill every process whose environment carries the token in that variable, until there is none left."""
    mark = f"{variable}={token}".encode()
    end = time.monotonic() + END_SECONDS
    while left := _with_mark(mark):
        if time.monotonic() > end:
            raise ChildError(f"processes {left} survive SIGKILL for {END_SECONDS:g} s")
        for pid in left:
            _kill_if(pid, mark)
        time.sleep(0.01)


def _with_mark(mark: bytes) -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _carries(entry, mark)]


def _carries(entry: Path, mark: bytes) -> bool:
    try:
        return mark in (entry / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended meanwhile, or belongs to somebody else
        return False


def _kill_if(pid: int, mark: bytes) -> None:
    """Kill the process if it is still the one meant, and see it end: a pidfd keeps its identity while we look."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if _carries(Path("/proc") / str(pid), mark):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            ended = select.poll()  # its environment goes before its sockets do
            ended.register(descriptor, select.POLLIN)
            ended.poll(END_SECONDS * 1000)
    except ProcessLookupError:
        pass
    finally:
        os.close(descriptor)
