"""A member of a fleet whose hub is away: all that wait do so at the same time."""

from __future__ import annotations

import asyncio
from typing import Any

from potluck.errors import HubUnavailableError
from potluck.fleet.member import FleetConfig, FleetMember
from potluck.peer.identity import Identity
from potluck.sim.virtualloop import in_virtual_time

PATIENCE_SECONDS = 60.0


class Away:
    """A hub that does not answer."""

    async def request(self, *arguments: Any, **named: Any) -> bytes:
        raise HubUnavailableError("it is away")


@in_virtual_time
async def test_many_that_ask_for_a_new_queue_meet_an_outage_once() -> None:
    nowhere: Any = None
    member = FleetMember(nowhere, "fleet", Identity.temporary(), FleetConfig(patience_seconds=PATIENCE_SECONDS))
    member._hub = Away()  # type: ignore[assignment]
    began = asyncio.get_running_loop().time()
    found = await asyncio.gather(*(member.definition("new", "queue", "put") for _ in range(20)), return_exceptions=True)
    assert all(isinstance(each, HubUnavailableError) for each in found)
    assert asyncio.get_running_loop().time() - began <= 2 * PATIENCE_SECONDS
