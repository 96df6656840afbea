"""Three machines, each with a hub and a guard; any one of them is killed, and a run goes on as if nothing had been.

Each peer knows one hub only, as somebody does who joined by a link: the others it learns from that one.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import pytest
from clusterhost import RUN

from potluck import tasks
from potluck.clock import SystemClock
from potluck.errors import PotluckError, RetryableError
from potluck.hub.access.member import Scopes
from potluck.hub.access.organise import Organiser
from potluck.hub.address import HubAddress
from potluck.hub.connection import Entry
from potluck.hub.joinlink import HubPlace, JoinLink, fetch_address
from potluck.hub.keys import HubKeys
from potluck.hub.nats.connection import NatsConnection
from potluck.hub.server.certificate import ca_hash
from potluck.hub.stores import STORES
from potluck.hub.subjects import Subjects
from potluck.link.links import Incoming
from potluck.messages import Message, decode
from potluck.peer.identity import Identity
from potluck.peer.lease import Lease
from potluck.run.peer import Peer, PeerConfig
from potluck.testing.polling import poll_until
from potluck.testing.ports import unused_tcp_port
from potluck.testing.processes import Children, ManagedProcess

PROGRAM = Path(__file__).with_name("clusterhost.py")
PATIENCE_SECONDS = 60.0  # a cluster chooses new leaders within 10 s; the machine may be busy
T = TypeVar("T")


class Numbered(Message, frozen=True, kw_only=True, tag="cluster.numbered"):
    """One of a series."""

    number: int


@dataclass
class Machine:
    """One hub with its guard."""

    process: ManagedProcess
    servers: tuple[str, ...]
    ca_pem: str
    server_pid: int

    def kill(self) -> None:
        """Hub and guard at once, as when the power fails: a hub that sees its end come would hand over first."""
        os.kill(self.server_pid, signal.SIGKILL)
        self.process.kill(group=True)


@dataclass
class Trio:
    """Three of them, and who takes part in the run."""

    machines: list[Machine]
    keys: HubKeys
    stack: AsyncExitStack
    scheme: str
    doubts: list[str] = field(default_factory=list)  # what any peer's roster said that is not true

    def address(self, number: int) -> HubAddress:
        """One machine's hub, and no other."""
        machine = self.machines[number]
        servers = tuple(server for server in machine.servers if server.startswith(self.scheme))
        return HubAddress(servers=servers, ca_pem=machine.ca_pem)

    async def organiser(self, number: int) -> Organiser:
        hub = await NatsConnection.connect(self.address(number), seed=self.keys.organiser_seed, run=RUN, name="main")
        self.stack.push_async_callback(hub.close)
        return Organiser(hub, Subjects(RUN), self.keys.organiser_public)

    async def join(self, organiser: Organiser, number: int) -> Peer:
        """A new peer by way of one machine."""
        _, invite = await organiser.create_invite(scopes=Scopes(coordinates=True))
        return await self.enter(self.address(number), invite)

    async def join_by_link(self, organiser: Organiser, first: int) -> Peer:
        """A new peer by a link that names all machines, one of them first."""
        _, invite = await organiser.create_invite(scopes=Scopes(coordinates=True))
        places = [self.place(number % 3) for number in range(first, first + 3)]
        link = JoinLink(
            host=places[0].host,
            port=places[0].port,
            websocket_port=places[0].websocket_port,
            others=tuple(places[1:]),
            run=RUN,
            ca_hash=ca_hash(self.machines[0].ca_pem),
            invite=invite,
        )
        return await self.enter(await fetch_address(JoinLink.parse(str(link))), invite)

    def place(self, number: int) -> HubPlace:
        """Where one machine's hub is."""
        tcp, websocket = (urlsplit(server) for server in self.machines[number].servers)
        return HubPlace(host=tcp.hostname or "", port=tcp.port or 0, websocket_port=websocket.port)

    async def enter(self, address: HubAddress, invite: str) -> Peer:
        """A new peer. It accepts no links, so all its messages go through the hubs."""
        config = PeerConfig(invite=invite, client_mode=True)
        peer = Peer(address, RUN, Identity.temporary(), config)
        await peer.start()
        self.stack.push_async_callback(peer.close)
        peer.session.roster.listen(
            lambda event: (
                self.doubts.append(f"{event.peer} {event.change}") if event.change in ("dead", "left") else None
            )
        )
        return peer


@pytest.fixture
def scheme(request: pytest.FixtureRequest) -> str:
    """By which kind of connection peers reach the hubs."""
    return str(getattr(request, "param", "tls"))


@pytest.fixture
async def trio(tmp_path: Path, children: Children, scheme: str) -> AsyncIterator[Trio]:
    routes = [f"127.0.0.1:{unused_tcp_port()}" for _ in range(3)]
    machines = []
    for number in range(3):
        folder = tmp_path / f"hub-{number}"
        if number:
            shutil.copytree(tmp_path / "hub-0" / "identity", folder / "identity")
        command: list[str | Path] = [sys.executable, PROGRAM, folder, str(number), *routes]
        process = children.spawn(command, name=f"machine-{number}", stdin=True)
        told = json.loads((await process.until_line('"servers"', PATIENCE_SECONDS)).string)
        machines.append(Machine(process, tuple(told["servers"]), told["ca_pem"], told["pid"]))
    for machine in machines:
        machine.process.send_line("start the guard")
    for machine in machines:
        await machine.process.until_line("^guard$", PATIENCE_SECONDS)
    async with AsyncExitStack() as stack:
        yield Trio(machines, HubKeys.load_or_create(tmp_path / "hub-0" / "identity"), stack, scheme)


class Series:
    """Numbered messages from one peer to another, sent all the time."""

    def __init__(self, sender: Peer, receiver: Peer) -> None:
        self.sent = 0
        self.received: list[int] = []
        self._sender = sender
        self._receiver = receiver
        receiver.links.handle(Numbered, self._receive)
        self._task = asyncio.create_task(self._send())

    def _receive(self, incoming: Incoming[Numbered]) -> None:
        self.received.append(incoming.message.number)

    async def _send(self) -> None:
        while True:
            message = Numbered(number=self.sent)
            await self._sender.links.send(self._receiver.peer_id, message, timeout_seconds=PATIENCE_SECONDS)
            self.sent += 1
            await asyncio.sleep(0.05)

    async def until_more(self) -> None:
        """Wait until what is sent from now on arrives."""
        mark = self.sent
        await poll_until(
            lambda: self._task.done() or len(self.received) > mark + 5, PATIENCE_SECONDS, "more relayed messages"
        )
        if self._task.done():
            self._task.result()

    async def finish(self) -> None:
        """Stop, and check that all arrived once and in order."""
        await tasks.end(self._task)
        await self._sender.links.flush(self._receiver.peer_id, timeout_seconds=PATIENCE_SECONDS)
        assert self.received == list(range(self.sent))


async def persist(attempt: Callable[[], Awaitable[T]], what: str) -> T:
    """Try until it works: whoever asks a hub that changes its leaders has to ask again."""
    failures: list[PotluckError] = []

    async def once() -> tuple[T] | None:
        try:
            return (await attempt(),)
        except RetryableError as error:
            failures.append(error)
            return None

    return (await poll_until(once, PATIENCE_SECONDS, lambda: f"{what}; at last: {failures[-1]!r}"))[0]


@pytest.mark.parametrize("victim", [0, 1, 2])
async def test_a_machine_dies_and_the_run_goes_on(trio: Trio, victim: int) -> None:
    await go_on_without(trio, victim)


@pytest.mark.parametrize("scheme", ["wss"], indirect=True)
async def test_a_machine_dies_and_peers_behind_a_firewall_go_on(trio: Trio) -> None:
    await go_on_without(trio, 0)


async def go_on_without(trio: Trio, victim: int) -> None:
    """Two peers, on the first two machines, at work with everything that a hub is for; then one machine dies."""
    organiser = await trio.organiser((victim + 1) % 3)
    ann, bob = await trio.join(organiser, 0), await trio.join(organiser, 1)
    seen: dict[str, bytes | None] = {}
    lineage = await bob.session.hub.store("lineage").watch(lambda entry: note(seen, entry))
    lease = Lease(ann.session.hub.store("lease"), ann.peer_id, SystemClock(), session=ann.session.card.session)
    await lease.start()
    trio.stack.push_async_callback(lease.close)
    trio.stack.push_async_callback(lineage.cancel)
    lease.stand()
    await poll_until(lambda: lease.is_held, PATIENCE_SECONDS, "the lease")
    there, back = Series(ann, bob), Series(bob, ann)
    await there.until_more()
    await back.until_more()
    token, revision = lease.token, lease.view.revision

    trio.machines[victim].kill()
    await there.until_more()
    await back.until_more()
    for peer in (ann, bob):
        subject = peer.session.subjects.ask(peer.peer_id, "time")
        answer = await persist(lambda p=peer, s=subject: p.session.hub.request(s, b"", timeout_seconds=2), "the time")
        assert abs(decode(float, answer) - time.time()) < PATIENCE_SECONDS
    await persist(lambda: ann.session.hub.store("lineage").put("epoch-1", b"done"), "a write")
    await poll_until(lambda: seen.get("epoch-1") == b"done", PATIENCE_SECONDS, "the watch to see the write")
    await poll_until(lambda: lease.is_held and lease.view.revision > revision, PATIENCE_SECONDS, "the lease to go on")
    assert lease.token == token  # nobody could renew it for a while, and nobody could take it either
    late = await persist(lambda: trio.join_by_link(organiser, victim), "somebody new to join")
    for peer in (ann, bob):
        await poll_until(lambda p=peer: late.peer_id in p.session.roster, PATIENCE_SECONDS, "the newcomer to be seen")
        assert {ann.peer_id, bob.peer_id} <= {presence.peer for presence in late.session.roster}
    await there.finish()
    await back.finish()
    for peer in (ann, bob):
        await poll_until(lambda p=peer: len(p.session.roster.alive()) == 3, PATIENCE_SECONDS, "all to be alive")
        assert not peer.session.ended.done()
    assert trio.doubts == []
    assert trio.machines[victim].process.exit_code == -signal.SIGKILL


async def test_stores_are_not_led_where_the_coordinator_is(trio: Trio) -> None:
    organiser = await trio.organiser(0)
    guard = await NatsConnection.connect(trio.address(0), seed=trio.keys.guard_seed, run=RUN, name="guard")
    trio.stack.push_async_callback(guard.close)

    async def leaders() -> list[str]:
        """Who leads each store; an empty name where that changes just now."""
        found = []
        for store in STORES:
            subject = f"$JS.API.STREAM.INFO.{Subjects(RUN).stream(store.name)}"
            answer = json.loads(await guard.request(subject, b"", timeout_seconds=2))
            found.append(str(answer.get("cluster", {}).get("leader", "")))
        return found

    before = await persist(leaders, "all stores to tell their leaders")
    place = before[[store.name for store in STORES].index("lease")] or "hub-0"
    ann = await trio.join(organiser, int(place.removeprefix("hub-")))
    lease = Lease(ann.session.hub.store("lease"), ann.peer_id, SystemClock(), session=ann.session.card.session)
    await lease.start()
    trio.stack.push_async_callback(lease.close)
    lease.stand()
    await poll_until(lambda: lease.is_held, PATIENCE_SECONDS, "the lease")
    token = lease.token

    async def are_elsewhere() -> bool:
        found = set(await persist(leaders, "all stores to tell their leaders"))
        return len(found) == 1 and not found & {place, ""}

    await poll_until(are_elsewhere, PATIENCE_SECONDS, f"all stores to be led by one server other than {place}")
    await persist(lambda: ann.session.hub.store("lineage").put("epoch-1", b"done"), "a write")
    assert lease.token == token


def note(seen: dict[str, bytes | None], entry: Entry) -> None:
    seen[entry.key] = entry.value
