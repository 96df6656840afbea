"""The way into a run, checked by going it: hub, access, clock, reachability, speed."""

from __future__ import annotations

from collections.abc import AsyncIterator

from potluck.errors import NotAdmittedError, PotluckError
from potluck.hub.address import HubAddress
from potluck.hub.joinlink import JoinLink, fetch_address
from potluck.peer.identity import Identity
from potluck.peer.machinecheck import Check, check_clock, check_round_trip
from potluck.run.peer import Peer, PeerConfig

SPEED_TEST_SECONDS = 30.0
SLOW_BYTES_PER_SECOND = 1_000_000
SLOW_REMEDY = "slow, and it counts all the same: rounds take longer. For such lines an organiser chooses diloco"


async def check_run(link: JoinLink) -> AsyncIterator[Check]:
    """Join the run as the peer that this machine would be, look around, and leave."""
    try:
        address = await fetch_address(link)
    except PotluckError as error:
        yield Check(name="hub", level="red", found="cannot be reached", remedy=str(error))
        return
    yield _check_way(address)
    identity = Identity.open_default()
    peer = Peer(address, link.run, identity, PeerConfig(link=link, name="doctor"))
    try:
        try:
            await peer.start()
        except NotAdmittedError as error:
            yield Check(name="access", level="yellow", found="not yet", remedy=str(error))
            return
        except PotluckError as error:
            yield Check(name="access", level="red", found="refused", remedy=str(error))
            return
        yield Check(
            name="access", level="green", found=f"you are in; others in the run: {len(peer.session.roster) - 1}"
        )
        async for check in look_around(peer):
            yield check
    finally:
        await peer.close()
        identity.close()


async def look_around(peer: Peer) -> AsyncIterator[Check]:
    """What a peer that is in finds out about its way there: hub, clock, reachability, speed."""
    session = peer.session
    yield check_round_trip(2 * session.hub_time.uncertainty_seconds)
    clock = peer.clock
    yield check_clock(session.hub_time.clock_error_seconds(monotonic=clock.monotonic(), wall=clock.wall()))
    await peer.reachability.decided()
    if session.card.addresses:
        yield Check(name="reachable", level="green", found=f"a full peer, at {', '.join(session.card.addresses)}")
    else:
        remedy = "works as a client peer; to help more, open a port and say so: --listen tcp://0.0.0.0:PORT"
        yield Check(name="reachable", level="yellow", found="nobody can dial this machine", remedy=remedy)
    yield await _check_speed(peer)


async def _check_speed(peer: Peer) -> Check:
    others = [presence for presence in peer.session.roster.alive() if presence.peer != peer.peer_id]
    if not others:
        return Check(name="speed", level="green", found="nobody is here to measure it with")
    other = min(others, key=lambda presence: (presence.card.role != "aux", presence.peer))
    try:
        speeds = await peer.speed_tester.measure(other.peer, timeout_seconds=SPEED_TEST_SECONDS)
    except PotluckError as error:
        return Check(name="speed", level="red", found=f"no bytes came through to {other.peer[:12]}", remedy=str(error))
    up, down = speeds.upload_bytes_per_second, speeds.download_bytes_per_second
    found = f"{up / 1e6:.1f} MB/s up, {down / 1e6:.1f} MB/s down"
    if min(up, down) >= SLOW_BYTES_PER_SECOND:
        return Check(name="speed", level="green", found=found)
    return Check(name="speed", level="yellow", found=found, remedy=SLOW_REMEDY)


def _check_way(address: HubAddress) -> Check:
    if address.servers[0].startswith("ws"):
        remedy = "your network lets only web traffic out; Potluck uses that"
        return Check(name="hub", level="yellow", found="reached by WebSocket only", remedy=remedy)
    return Check(name="hub", level="green", found=f"reached at {address.servers[0]}")
