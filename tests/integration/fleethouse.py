"""A hub with queues, and members of a fleet: what the fleet's integration tests stand on."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from guardhouse import RUN, GuardHouse, Person

from potluck.fleet.member import FleetConfig, FleetMember
from potluck.fleet.sync import AsyncFleet
from potluck.hub.access.organise import Done
from potluck.hub.access.queueing import CreateQueue
from potluck.hub.queues import QueueDefinition
from potluck.hub.server.embedded import EmbeddedHub
from potluck.peer.identity import Identity

ALL = ("put", "take")


async def organiser(house: GuardHouse) -> AsyncFleet:
    """The fleet in the organiser's name."""
    return await connect(house, house.host, is_member=True)


async def connect(house: GuardHouse, person: Person, *, is_member: bool = False, **config: Any) -> AsyncFleet:
    """The fleet in a person's name; left when the house closes."""
    member = FleetMember(house.hub.address(), RUN, Identity(person.seed), FleetConfig(**config))
    await member.open(is_member=is_member)
    fleet = AsyncFleet(member)
    house.close_later(fleet.close)
    return fleet


async def add(house: GuardHouse, name: str, **limits: Any) -> None:
    """Make a queue or topic."""
    fleet = await organiser(house)
    await fleet.member.ask("create", CreateQueue(definition=QueueDefinition(name=name, **limits)), Done)
    await fleet.close()


async def worker(house: GuardHouse, rights: dict[str, tuple[str, ...]], **config: Any) -> AsyncFleet:
    """A new member with these rights."""
    person = await house.newcomer(roles=("worker",), queues=rights)
    return await connect(house, person, is_member=True, **config)


async def kill_and_restart_server(house: GuardHouse, away_seconds: float = 0.0) -> None:
    """SIGKILL to the hub's server, and another one on the same folder and ports; the guard finds it by itself."""
    assert house.hub._process is not None
    os.kill(house.hub._process.pid, signal.SIGKILL)
    await house.hub.stop()
    await asyncio.sleep(away_seconds)
    house.hub = EmbeddedHub(house.hub.config)
    await house.hub.start()
    house.close_later(house.hub.stop)
