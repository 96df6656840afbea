"""Keeps an embedded hub going: starts its server again when it has died, or when a full disk has broken it.

Three things go wrong with a server that runs for months:

*It dies*, killed by the kernel for lack of memory, by a person, or by its own fault. It is started again on the
same ports with the same certificate, and members find back by themselves. After too many deaths in a short time
(restarts.py) it is given up, with its last output.

*Its disk is full.* From the first write that fails on, a stream of nats-server refuses all others, also when there is
room again: only a new process writes. So room is waited for, however long that takes, and then the server is replaced.
What it has confirmed is on disk, and is there afterwards.

*It does not answer*, since somebody stopped it or the machine is overloaded. It holds all connections and may go on
at any moment, so this is told, and nothing is done about it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from potluck.clock import Clock, SystemClock
from potluck.errors import HubUnavailableError, PotluckError
from potluck.hub.server.diskspace import DiskSpace, measure
from potluck.hub.server.restarts import Restarts

logger = logging.getLogger(__name__)

LOOK_EVERY_SECONDS = 2.0
SILENT_SECONDS = 10.0  # a server that does not answer for so long is worth a line
SETTLED_SECONDS = 60.0  # for so long a restart is told as a trouble
_NO_SPACE = ("no space left", "quota exceeded")


class Restartable(Protocol):
    """What is supervised; EmbeddedHub is one."""

    @property
    def died(self) -> asyncio.Future[str]:
        """Gets the reason when the server ends by itself."""
        ...

    async def write_error(self) -> str:
        """Why streams cannot be written, in the server's words; empty when they can. HubUnavailableError: no answer."""
        ...

    async def restart(self) -> None:
        """Replace the server."""
        ...


class Supervisor:
    """Watches one hub. `run` is its life."""

    def __init__(
        self,
        hub: Restartable,
        folder: Path,
        *,
        clock: Clock | None = None,
        measure_disk: Callable[[Path], DiskSpace] = measure,
    ) -> None:
        self._hub = hub
        self._folder = folder
        self._clock = clock or SystemClock()
        self._measure = measure_disk
        self._restarts = Restarts(self._clock)
        self._space: DiskSpace | None = None
        self._is_waiting_for_room = False
        self._answered_at = self._restarted_at = -float("inf")
        self._is_silent = False
        self._last_reason = ""
        self.num_restarts = 0

    @property
    def troubles(self) -> dict[str, str]:
        """What people should know now, and what to do about it."""
        found: dict[str, str] = {}
        if self._space is not None and (self._is_waiting_for_room or self._space.level != "enough"):
            found["disk"] = self._disk_text(self._space)
        if self._clock.monotonic() - self._restarted_at < SETTLED_SECONDS:
            times = f"{self.num_restarts} times by now" if self.num_restarts > 1 else "once"
            found["hub server"] = f"the hub's server was started again ({times}): {self._last_reason}"
        return found

    async def run(self) -> str:
        """Watch and repair; returns why, when the server is given up."""
        self._answered_at = self._clock.monotonic()
        while True:
            await asyncio.wait({self._hub.died}, timeout=LOOK_EVERY_SECONDS)
            self._look_at_disk()
            reason = await self._why_broken()
            if reason and not await self._is_repaired(reason):
                return f"the hub's server fails again and again, so the host ends: {reason}"

    def _look_at_disk(self) -> None:
        before = self._space.level if self._space is not None else "enough"
        try:
            self._space = space = self._measure(self._folder)
        except OSError as error:
            logger.warning("the room on the disk of %s cannot be measured: %s", self._folder, error)
            return
        if space.level != before:
            if space.level == "enough":
                logger.warning("the disk of %s has room again: %s", self._folder, space)
            else:
                logger.warning("%s", self._disk_text(space))

    def _disk_text(self, space: DiskSpace) -> str:
        where = f"the disk of the host's folder {self._folder}"
        if self._is_waiting_for_room:
            return (
                f"{where} is full ({space}), so the hub cannot write: the run waits, and goes on by itself when there "
                f"is room. Delete what is not needed there, until {space.reserve_bytes / 1e6:.1f} MB are free"
            )
        if space.level == "full":
            return f"{where} is nearly full ({space}), and the run stops when it is: delete what is not needed there"
        return f"{where} has little room left ({space}): delete what is not needed there before it is full"

    async def _why_broken(self) -> str:
        """Why the server needs to be replaced; empty when it does not, as far as it tells."""
        if self._hub.died.done():
            return self._hub.died.result()
        try:
            error = await self._hub.write_error()
        except HubUnavailableError as failure:
            silent_seconds = self._clock.monotonic() - self._answered_at
            if silent_seconds >= SILENT_SECONDS and not self._is_silent and not self._hub.died.done():
                self._is_silent = True
                logger.warning(
                    "the hub's server does not answer for %.0f s: is it stopped, or is this machine overloaded? (%s)",
                    silent_seconds,
                    failure,
                )
            return ""
        if self._is_silent:
            logger.warning("the hub's server answers again")
        self._is_silent = False
        self._answered_at = self._clock.monotonic()
        return f"its streams cannot be written: {error}" if error else ""

    async def _is_repaired(self, reason: str) -> bool:
        """Try to start the server again, if there is room for it to write; False when that was tried too often."""
        is_full = self._space is not None and self._space.level == "full"
        is_disks_fault = is_full or any(words in reason for words in _NO_SPACE)
        if is_full:
            if not self._is_waiting_for_room and self._space is not None:
                self._is_waiting_for_room = True
                logger.error("%s", self._disk_text(self._space))
            await asyncio.sleep(LOOK_EVERY_SECONDS)
            return True
        wait_seconds = self._restarts.next_wait_seconds()
        if wait_seconds is None and not is_disks_fault:
            return False
        if not self._hub.died.done():
            logger.warning("the hub's server no longer works: %s", reason)
        logger.warning("starting the hub's server again")
        await asyncio.sleep(LOOK_EVERY_SECONDS if wait_seconds is None else wait_seconds)
        try:
            await self._hub.restart()
        except PotluckError as error:
            logger.warning("the hub's server could not be started again: %s", error)
            return True
        self.num_restarts += 1
        self._is_waiting_for_room = False
        self._last_reason = reason
        self._restarted_at = self._answered_at = self._clock.monotonic()
        logger.warning("the hub's server is there again")
        return True
