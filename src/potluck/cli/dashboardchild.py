"""The dashboard of a host, in a process of its own: whatever visitors do to it, hub and guard do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path

from potluck import tasks

logger = logging.getLogger(__name__)

RETRY_FIRST_SECONDS = 2.0
RETRY_LIMIT_SECONDS = 60.0
CLOSING_SECONDS = 8.0
USERS_MISTAKE = 2  # the exit code


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardOptions:
    """What the host tells its dashboard."""

    run: str
    folder: Path
    listen: str
    port: int | None
    """None: the usual one, or a free one if that is taken."""
    recipe: Path | None = None
    """The organiser's own recipe, if it is not a built-in one."""
    shown_host: str = ""
    """The machine's name for others, if they may open the dashboard."""
    trusted_proxies: tuple[str, ...] = ()
    """Trusted proxies, for their X-Forwarded headers."""


class DashboardChild:
    """Serves until closed; after a crash, again. If the port is taken, it says so and gives up."""

    def __init__(self, options: DashboardOptions, as_json: bool) -> None:
        self._options = options
        self._as_json = as_json
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(self._keep_serving(), name="dashboard")

    async def close(self) -> None:
        """End the process. Not by cancelling: it has to be waited for."""
        self._stop.set()
        await self._task

    async def _keep_serving(self) -> None:
        retry_seconds = RETRY_FIRST_SECONDS
        while not self._stop.is_set():
            code = await self._serve_once()
            if self._stop.is_set() or code in (0, USERS_MISTAKE):  # asked to end, or it has told what is wrong
                return
            logger.warning("the dashboard has ended (exit code %s): again in %.0f s", code, retry_seconds)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(retry_seconds):
                    await self._stop.wait()
            retry_seconds = min(2 * retry_seconds, RETRY_LIMIT_SECONDS)

    async def _serve_once(self) -> int:
        options = self._options
        port = ("--port", str(options.port)) if options.port is not None else ()
        recipe = ("--recipe", str(options.recipe)) if options.recipe is not None else ()
        proxies = tuple(f"--trust-proxy={proxy}" for proxy in options.trusted_proxies)
        where = ("--run", options.run, "--folder", str(options.folder), *recipe)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "potluck.cli", "dashboard", *where, "--listen", options.listen, *port, *proxies,
            "--while-read", "--json", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the host, which ends it
        )  # fmt: skip
        reading = asyncio.create_task(self._read(process), name="reads the dashboard")
        stopping = asyncio.create_task(self._stop.wait(), name="end of the dashboard")
        try:
            await asyncio.wait({reading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(process)
            await tasks.end(stopping)
            await reading
        return process.returncode or 0

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            _tell(json.loads(line), self._options, self._as_json)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Closes its standard input, as our death would; by force if that does not help."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(CLOSING_SECONDS):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _tell(event: dict[str, str], options: DashboardOptions, as_json: bool) -> None:
    from potluck.cli import console

    if as_json:
        console.print_json(event)
        return
    url, token = event["url"], event["token"]
    port = url.rpartition(":")[2]
    host = options.shown_host
    public = f"http://{f'[{host}]' if ':' in host else host}:{port}" if host else url
    console.out.print(f"The dashboard is at [bold]{public}[/bold]", highlight=False, soft_wrap=True)
    console.out.print(f"Organisers open, on this machine: {url}/login#{token}", highlight=False, soft_wrap=True)
