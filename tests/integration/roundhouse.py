"""A real hub with a real guard, and invites for peers of every kind: what the tests of rounds stand on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from potluck.hub.access.member import GroupRule, Scopes
from potluck.hub.access.organise import Organiser
from potluck.hub.address import HubAddress
from potluck.hub.guard.guard import GuardConfig
from potluck.hub.nats.connection import NatsConnection
from potluck.hub.server.configuration import HubConfig
from potluck.hub.subjects import Subjects
from potluck.run.host import Host, HostConfig

RUN = "kitchen"
ANYTHING = Scopes(roles=("trainer", "aux", "observer"), coordinates=True, trusted=True)
NO_COORDINATOR = Scopes(roles=("trainer", "aux", "observer"))


class RoundHouse:
    """A host without a peer of its own, which can be restarted in place."""

    def __init__(self, folder: Path, groups: Mapping[str, GroupRule] | None = None) -> None:
        self._config = HostConfig(
            hub=HubConfig(folder=folder, run=RUN, host="127.0.0.1", websocket_port=None, sync_always=False),
            guard=GuardConfig(run=RUN, groups=groups),
            peer=None,
        )
        self._host = Host(self._config)

    @property
    def address(self) -> HubAddress:
        return self._host.address

    async def start(self) -> None:
        await self._host.start()

    async def stop(self) -> None:
        await self._host.stop()

    async def restart(self) -> None:
        """The hub and its guard end, and come back on the same ports with what was on disk."""
        await self._host.stop()
        self._host = Host(self._config)
        await self._host.start()

    async def invite(self, scopes: Scopes) -> str:
        """The secret of an invite for as many as like."""
        assert self._host._hub is not None
        keys = self._host._hub.keys
        connection = await NatsConnection.connect(self.address, seed=keys.organiser_seed, run=RUN, name="main")
        try:
            organiser = Organiser(connection, Subjects(RUN), keys.organiser_public)
            _, secret = await organiser.create_invite(scopes=scopes, uses=None)
            return secret
        finally:
            await connection.close()


@asynccontextmanager
async def open_house(folder: Path, groups: Mapping[str, GroupRule] | None = None) -> AsyncIterator[RoundHouse]:
    house = RoundHouse(folder, groups)
    await house.start()
    try:
        yield house
    finally:
        await house.stop()
