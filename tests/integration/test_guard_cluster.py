"""Two guards on a cluster of three hubs: members are cut off wherever they are, and no single hub is missed."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from guardhouse import RUN, SUBJECTS, beacon, hand_in_card, knock

from potluck import tasks
from potluck.errors import PotluckError, RetryableError
from potluck.hub.access.application import Application
from potluck.hub.access.organise import Organiser
from potluck.hub.address import HubAddress
from potluck.hub.guard.guard import Guard, GuardConfig
from potluck.hub.keys import new_seed, public_key
from potluck.hub.nats.connection import NatsConnection
from potluck.hub.presence import Presence
from potluck.hub.server.configuration import ClusterConfig, HubConfig
from potluck.hub.server.embedded import EmbeddedHub
from potluck.messages import decode
from potluck.testing.polling import poll_until
from potluck.testing.ports import unused_tcp_port

PATIENCE_SECONDS = 60.0


@dataclass
class Trio:
    """Three hubs, guards on the first two, and members who show that they are alive."""

    hubs: list[EmbeddedHub]
    guards: list[Guard]
    stack: AsyncExitStack
    members: dict[str, NatsConnection] = field(default_factory=dict)

    def address(self, first: int) -> HubAddress:
        """All hubs, one of them first."""
        hubs = [*self.hubs[first:], *self.hubs[:first]]
        return HubAddress(servers=tuple(hub.address().servers[0] for hub in hubs), ca_pem=hubs[0].ca_pem)

    async def connect(self, seed: bytes, name: str, first: int) -> NatsConnection:
        connection = await NatsConnection.connect(self.address(first), seed=seed, run=RUN, name=name)
        self.stack.push_async_callback(connection.close)
        return connection

    async def organiser(self, first: int) -> Organiser:
        keys = self.hubs[0].keys
        connection = await self.connect(keys.organiser_seed, "main", first)
        return Organiser(connection, SUBJECTS, keys.organiser_public)

    async def join(self, organiser: Organiser, first: int) -> tuple[str, NatsConnection]:
        """A new member that connects to one of the hubs."""
        seed = new_seed("user")
        peer = public_key(seed)
        _, secret = await organiser.create_invite()
        lobby = await self.connect(seed, "lobby", first)
        answer = await knock(lobby, peer, Application(role="trainer", invite=secret))
        if answer.code == "hub_busy":
            raise RetryableError(answer.message)
        assert answer.status == "admitted"
        self.members[peer] = main = await self.connect(seed, "main.s1", first)
        assert (await hand_in_card(main, peer, session="s1")).accepted
        return peer, main

    async def beacons(self) -> None:
        """Signs of life of all members, also of those whose card is still to be written down."""
        while True:
            for peer, main in list(self.members.items()):
                with suppress(PotluckError):  # away, or not wanted any more
                    await beacon(main, peer)
            await asyncio.sleep(0.5)

    async def state(self, peer: str) -> str | None:
        """What the roster says, as a guard reads it."""
        reader = next(guard for guard in self.guards if guard._hub is not None and guard._hub.is_connected)
        assert reader._hub is not None
        try:
            entry = await reader._hub.store("roster").get(peer)
        except RetryableError:
            return None
        return decode(Presence, entry.value or b"").state if entry is not None else None

    async def until_state(self, peer: str, state: str) -> None:
        async def is_there() -> bool:
            return await self.state(peer) == state

        await poll_until(is_there, PATIENCE_SECONDS, f"{peer[:6]} to be {state}")


@pytest.fixture
async def trio(tmp_path: Path) -> AsyncIterator[Trio]:
    ports = [unused_tcp_port() for _ in range(3)]
    routes = tuple(f"127.0.0.1:{port}" for port in ports)
    async with AsyncExitStack() as stack:
        hubs: list[EmbeddedHub] = []
        for number, port in enumerate(ports):
            folder = tmp_path / f"hub-{number}"
            if number:
                shutil.copytree(tmp_path / "hub-0" / "identity", folder / "identity")
            config = HubConfig(
                folder=folder,
                run=RUN,
                host="127.0.0.1",
                websocket_port=None,
                sync_always=False,
                cluster=ClusterConfig(name="trio", server_name=f"hub-{number}", port=port, routes=routes),
            )
            hub = EmbeddedHub(config)
            await hub.start()
            stack.push_async_callback(hub.stop)
            hubs.append(hub)
        opened = Trio(hubs, [], stack)
        for first in (0, 1):
            guard = Guard(GuardConfig(run=RUN, replicas=3), hubs[0].keys, opened.address(first))
            await guard.start()
            stack.push_async_callback(guard.stop)
            opened.guards.append(guard)
        heart = asyncio.create_task(opened.beacons())
        stack.push_async_callback(tasks.end, heart)
        yield opened


async def test_a_ban_cuts_off_on_whichever_hub_it_is(trio: Trio):
    organiser = await trio.organiser(0)
    members = [await trio.join(organiser, first) for first in range(3)]
    for peer, _ in members:
        await trio.until_state(peer, "alive")
    for peer, main in members:
        await organiser.ban(peer)
        await poll_until(lambda main=main: not main.is_connected, PATIENCE_SECONDS, "the connection to be cut")
        await trio.until_state(peer, "dead")


@pytest.mark.parametrize("victim", [0, 2])
async def test_a_hub_is_killed_and_everything_goes_on(trio: Trio, victim: int):
    organiser = await trio.organiser(victim)
    ann, anns = await trio.join(organiser, victim)  # on the hub that dies
    bob, _ = await trio.join(organiser, 1)
    await trio.until_state(ann, "alive")
    os.kill(trio.hubs[victim].pid, signal.SIGKILL)
    await poll_until(
        lambda: anns.is_connected and anns.statistics()["reconnects"], PATIENCE_SECONDS, "ann to find another hub"
    )
    await trio.until_state(ann, "alive")
    await trio.until_state(bob, "alive")

    async def join_late() -> tuple[str, NatsConnection] | None:
        try:
            return await trio.join(organiser, 1)
        except RetryableError:
            return None

    late, _ = await poll_until(join_late, PATIENCE_SECONDS, "somebody new to be let in")
    await trio.until_state(late, "alive")
    # The connection that ann had on the dead hub hides nothing: when it goes for good, it is known at once.
    await anns.close()
    await trio.until_state(ann, "dead")
    await trio.until_state(bob, "alive")
