"""A run inside of a program that trains: hub and guard in a thread of their own, until the program is done.

Made for a person's own machines and friends: everybody with its link is trusted with the whole run (may coordinate and
reduce), so that it needs no other peer than those who train. It ends with the program: a run that strangers join, or
that outlives its first peer, is started with `potluck host`.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from potluck.errors import ConfigurationError, RetryableError
from potluck.hub.access.member import Scopes
from potluck.hub.access.organise import Organiser
from potluck.hub.guard.guard import GuardConfig
from potluck.hub.joinlink import JoinLink
from potluck.hub.nats.connection import NatsConnection
from potluck.hub.server.configuration import HubConfig
from potluck.hub.subjects import Subjects
from potluck.link.direct.addresses import announced_hosts
from potluck.run.host import Host, HostConfig
from potluck.run.loopthread import LoopThread

logger = logging.getLogger(__name__)

PRIVATE = Scopes(roles=("trainer", "aux", "observer"), coordinates=True, trusted=True)
LOOK_SECONDS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedConfig:
    """What a person can choose about a run of the program's own."""

    folder: Path | None = None
    """Where the hub's files are; started on it again, the run goes on and its links stay valid. None: nowhere."""

    listen: str = "0.0.0.0"
    """The address on which the hub listens."""

    port: int = 0
    """The port for members; 0 picks a free one."""

    announce: tuple[str, ...] = ()
    """Names or addresses by which others reach this machine; its own on the network when empty."""

    linger_seconds: float = 30.0
    """How long the hub stays for others who still train when this program is done. Ctrl-C ends the wait."""

    def __post_init__(self) -> None:
        if not self.linger_seconds >= 0:
            raise ConfigurationError(f"linger_seconds={self.linger_seconds}: it must be 0 or more")


class EmbeddedRun:
    """A hub with its guard, for programs that are not asynchronous."""

    def __init__(self, run: str, config: EmbeddedConfig) -> None:
        self._config = config
        self._temporary = None if config.folder else Path(tempfile.mkdtemp(prefix="potluck-"))
        self._host = Host(
            HostConfig(
                hub=HubConfig(
                    folder=config.folder or self._temporary or Path(),
                    run=run,
                    host=config.listen,
                    port=config.port,
                    advertised_hosts=config.announce or announced_hosts(config.listen),
                    sync_always=config.folder is not None,
                ),
                guard=GuardConfig(run=run),
                peer=None,
            )
        )
        self._loop = LoopThread("potluck-host")
        self._link: JoinLink | None = None
        self._stack = AsyncExitStack()
        self._organiser: Organiser | None = None

    @property
    def link(self) -> str:
        """By which everybody joins, this program too."""
        assert self._link is not None, "the run is not started"
        return str(self._link)

    def start(self) -> Self:
        """Start hub and guard; on failure everything is released again."""
        self._loop.start()
        try:
            self._loop.call(self._start())
        except BaseException:
            self._release()
            raise
        return self

    def close(self) -> None:
        """Wait for others who are still in the run, but not for ever; then end it. Idempotent."""
        if not self._loop.is_running:
            return
        try:
            others = self._loop.call(self._others_left())
            if others:
                logger.warning(
                    "the run ends, and %d other peer(s) still train in it: start a run that outlives its first peer "
                    "with `potluck host`, or have this one wait longer (linger_seconds)",
                    others,
                )
        finally:
            self._release()

    def _release(self) -> None:
        try:
            self._loop.call(self._stack.aclose())
        finally:
            self._loop.close()
            if self._temporary is not None:
                shutil.rmtree(self._temporary, ignore_errors=True)

    async def _start(self) -> None:
        self._stack.push_async_callback(self._host.stop)
        await self._host.start()
        keys, run = self._host.keys, self._host.config.hub.run
        hub = await NatsConnection.connect(self._host.address, seed=keys.organiser_seed, run=run, name="main")
        self._stack.push_async_callback(hub.close)
        self._organiser = Organiser(hub, Subjects(run), keys.organiser_public)
        _, invite = await self._organiser.create_invite(scopes=PRIVATE, uses=None, note="everybody with the link")
        self._link = replace(self._host.link, invite=invite)

    async def _others_left(self) -> int:
        """How many peers are in the run still after the wait; our own has left before."""
        deadline = asyncio.get_running_loop().time() + self._config.linger_seconds
        told = False
        while True:
            others = await self._num_peers()
            if not others or asyncio.get_running_loop().time() >= deadline:
                return others
            if not told:
                told = True
                logger.info("this program is done; the hub stays for %d other peer(s) that still train", others)
            await asyncio.sleep(LOOK_SECONDS)

    async def _num_peers(self) -> int:
        assert self._organiser is not None
        try:
            members = await self._organiser.list_members()
        except RetryableError as error:
            logger.debug("the members of the run cannot be listed: %s", error)
            return 0
        return sum(1 for member in members if member.state in ("alive", "suspect"))
