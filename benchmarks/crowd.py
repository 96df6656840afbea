"""A process of the presence benchmark: the host of a run, or a crowd of peers in it.

    python crowd.py host FOLDER          says {"link": …, "hub": PID}, then serves until its input ends
    python crowd.py join LINK COUNT      says {"event": "ready"}, then does as told by lines of JSON

    {"do": "join"}                          {"event": "joined", "peers": […]} when all of its peers are in
    {"do": "until present", "count": N}     {"event": "present", "at": …, "missed": 0} once every roster has N peers
    {"do": "until gone", "peers": […]}      {"event": "gone", "at": …, "missed": 0, "told": {"dead": …, "left": …}}
    {"do": "leave", "count": N}             {"event": "left", "peers": […]}
    {"do": "report", "peers": […]}          {"event": "report", …}: who was doubted, which rosters are wrong

Times are those of the wall clock, which all processes of one machine share. What has not come in good time is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import potluck
from potluck import tasks
from potluck.cli.console import run
from potluck.errors import AccessError, RetryableError
from potluck.hub.access.application import Application
from potluck.hub.address import HubAddress
from potluck.hub.connection import HubConnection
from potluck.hub.guard.guard import GuardConfig
from potluck.hub.joinlink import JoinLink, fetch_address
from potluck.hub.nats.connection import ConnectionConfig, NatsConnection
from potluck.hub.presence import Beacon, Card
from potluck.hub.server.configuration import HubConfig
from potluck.hub.subjects import Subjects
from potluck.messages import encode
from potluck.peer.admission import be_admitted
from potluck.peer.identity import Identity
from potluck.peer.roster import Roster, RosterEvent
from potluck.peer.session import BEACON_EVERY_SECONDS, REQUEST_TIMEOUT_SECONDS, Connector, Session, new_session_id
from potluck.run.host import Host, HostConfig
from potluck.run.peer import Peer, PeerConfig
from potluck.testing.polling import ConditionNotMetError, poll_until

Kind = Literal["linked", "lone", "blind"]

RUN = "crowd"
JOINING_AT_ONCE = 4
LAG_EVERY_SECONDS = 0.05
PATIENCE_SECONDS = 120.0


class LonePeer:
    """A peer without links: admission, session, beacons, roster. One that is `blind` keeps no roster either."""

    def __init__(self, address: HubAddress, identity: Identity, invite: str, *, blind: bool) -> None:
        self._address = address
        self._identity = identity
        self._application = Application(role="trainer", invite=invite, version=potluck.__version__)
        self._subjects = Subjects(RUN)
        self._session_id = new_session_id()
        card = Card(session=self._session_id, role="trainer", version=potluck.__version__)
        self.peer_id = identity.peer_id
        kind = BlindSession if blind else Session
        self.session = kind(self._connect, identity, self._subjects, card)

    async def start(self) -> None:
        await be_admitted(self._connect, self._subjects, self.peer_id, self._application)
        await self.session.open()

    async def close(self) -> None:
        await self.session.close()
        self._identity.close()

    async def _connect(
        self,
        lane: str,
        *,
        on_connected: Callable[[], None] | None = None,
        on_disconnected: Callable[[], None] | None = None,
        on_refused: Callable[[AccessError], None] | None = None,
    ) -> NatsConnection:
        return await NatsConnection.connect(
            self._address,
            seed=self._identity.seed,
            run=RUN,
            name=f"{lane}.{self._session_id}",
            config=ConnectionConfig(stores="guard"),
            on_connected=on_connected,
            on_disconnected=on_disconnected,
            on_refused=on_refused,
        )


class BlindSession:
    """What the hub sees of a session, and no more: one machine can have a thousand of them, but not their rosters."""

    def __init__(self, connect: Connector, identity: Identity, subjects: Subjects, card: Card) -> None:
        self._connect = connect
        self._peer_id = identity.peer_id
        self._subjects = subjects
        self._card = card
        self._hub: HubConnection | None = None
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        self._hub = await self._connect("main")
        await self._hub.request(
            self._subjects.card(self._peer_id), encode(self._card), timeout_seconds=REQUEST_TIMEOUT_SECONDS
        )
        self._task = asyncio.create_task(self._send_beacons(self._hub))

    async def _send_beacons(self, hub: HubConnection) -> None:
        while True:
            await hub.publish(self._subjects.beacon(self._peer_id), encode(Beacon(session=self._card.session)))
            await asyncio.sleep(BEACON_EVERY_SECONDS)

    async def close(self) -> None:
        await tasks.end(self._task)
        if self._hub is not None:
            beacon = encode(Beacon(session=self._card.session))
            await self._hub.request(
                self._subjects.leave(self._peer_id), beacon, timeout_seconds=REQUEST_TIMEOUT_SECONDS
            )
            await self._hub.close()


class Crowd:
    """Peers of one process, and what their rosters have said."""

    def __init__(self) -> None:
        self.peers: list[Peer | LonePeer] = []
        self.doubted: Counter[str] = Counter()  # suspect, or dead, by peer: how many rosters said so
        self.ended: Counter[tuple[str, str]] = Counter()  # by peer, and whether it was dead or left
        self.changed_at = time.time()
        self.num_retries = 0
        self.longest_lag_seconds = 0.0

    async def watch_lag(self) -> None:
        """See how late this process is at times: a machine that is too slow for so many peers makes beacons late."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(LAG_EVERY_SECONDS)
            self.longest_lag_seconds = max(self.longest_lag_seconds, time.monotonic() - began - LAG_EVERY_SECONDS)

    @property
    def rosters(self) -> list[Roster]:
        """Those that our peers keep."""
        return [peer.session.roster for peer in self.peers if isinstance(peer.session, Session)]

    async def join(self, link: JoinLink, kinds: Sequence[Kind]) -> None:
        """Add peers of these kinds, some at a time."""
        address = await fetch_address(link)
        turns = asyncio.Semaphore(JOINING_AT_ONCE)

        async def join_one(kind: Kind) -> None:
            async with turns:
                while not await self._join_one(address, link.invite, kind):
                    self.num_retries += 1

        async with asyncio.TaskGroup() as group:
            for kind in kinds:
                group.create_task(join_one(kind))

    async def _join_one(self, address: HubAddress, invite: str, kind: Kind) -> bool:
        identity = Identity.temporary()
        peer: Peer | LonePeer
        if kind == "linked":
            peer = Peer(address, RUN, identity, PeerConfig(invite=invite, client_mode=True))
        else:
            peer = LonePeer(address, identity, invite, blind=kind == "blind")
        if isinstance(peer.session, Session):
            peer.session.roster.listen(self._note)
        try:
            await peer.start()
        except RetryableError as error:
            await peer.close()
            print(f"a peer has to try again: {error}", file=sys.stderr, flush=True)
            return False
        self.peers.append(peer)
        return True

    def _note(self, event: RosterEvent) -> None:
        if event.change in ("joined", "dead", "left"):
            self.changed_at = time.time()
        if event.change in ("suspect", "dead"):
            self.doubted[event.peer] += 1
        if event.change in ("dead", "left"):
            self.ended[event.peer, event.change] += 1

    async def until_present(self, count: int) -> None:
        missed = await self._none_left(lambda: sum(abs(count - len(roster)) for roster in self.rosters))
        say("present", at=self.changed_at, missed=missed)

    async def until_gone(self, gone: list[str]) -> None:
        missed = await self._none_left(lambda: sum(other in roster for roster in self.rosters for other in gone))
        told = {how: sum(self.ended[other, how] for other in gone) for how in ("dead", "left")}
        say("gone", at=self.changed_at, missed=missed, told=told)

    async def _none_left(self, count: Callable[[], int]) -> int:
        """Wait until there is nothing to count, and return what is left when patience ends."""
        with contextlib.suppress(ConditionNotMetError):
            await poll_until(lambda: count() == 0, PATIENCE_SECONDS, "all rosters to agree")
        return count()

    async def leave(self, count: int) -> None:
        self.peers.sort(key=lambda peer: isinstance(peer.session, Session))  # who keeps a roster stays to see it
        leaving, self.peers = self.peers[:count], self.peers[count:]
        say("left", peers=[peer.peer_id for peer in leaving])
        await asyncio.gather(*(peer.close() for peer in leaving))

    def report(self, expected: list[str]) -> None:
        """Whom our rosters doubted, and how many entries are missing or too many in them."""
        wanted = set(expected)
        wrong = sum(len(wanted ^ {presence.peer for presence in roster}) for roster in self.rosters)
        say("report", doubted=self.doubted, missed=wrong, retries=self.num_retries, lag=self.longest_lag_seconds)

    async def close(self) -> None:
        await asyncio.gather(*(peer.close() for peer in self.peers))


def say(event: str, **fields: Any) -> None:
    """One line for the benchmark."""
    print(json.dumps({"event": event, **fields}), flush=True)


async def orders() -> asyncio.StreamReader:
    """What comes on standard input."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def serve(folder: Path) -> None:
    """Hub and guard, nothing else."""
    hub = HubConfig(folder=folder, run=RUN, host="127.0.0.1", advertised_hosts=("127.0.0.1",))
    host = Host(HostConfig(hub=hub, guard=GuardConfig(run=RUN), peer=None))
    await host.start()
    try:
        pid = int((folder / "server.pid").read_text())
        print(json.dumps({"link": str(host.link), "hub": pid}), flush=True)
        await (await orders()).read()
    finally:
        await host.stop()


async def take_part(link: JoinLink, kinds: Sequence[Kind]) -> None:
    """Join with so many peers, and do as told."""
    crowd = Crowd()
    lag = asyncio.create_task(crowd.watch_lag())
    try:
        reader = await orders()
        say("ready")
        while line := await reader.readline():
            match json.loads(line):
                case {"do": "join"}:
                    await crowd.join(link, kinds)
                    say("joined", peers=[peer.peer_id for peer in crowd.peers])
                case {"do": "until present", "count": number}:
                    await crowd.until_present(number)
                case {"do": "until gone", "peers": peers}:
                    await crowd.until_gone(peers)
                case {"do": "leave", "count": number}:
                    await crowd.leave(number)
                case {"do": "report", "peers": peers}:
                    crowd.report(peers)
    finally:
        await tasks.end(lag)
        await crowd.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["host", "join"])
    parser.add_argument("where", help="the host's folder, or the join link")
    parser.add_argument("count", nargs="?", type=int, default=1)
    parser.add_argument("--no-links", action="store_true", help="sessions only")
    parser.add_argument("--blind", type=int, default=0, help="how many of them only send beacons, and keep no roster")
    arguments = parser.parse_args()
    if arguments.part == "host":
        run(serve(Path(arguments.where)))
    else:
        seeing: Kind = "lone" if arguments.no_links else "linked"
        kinds: list[Kind] = [seeing] * (arguments.count - arguments.blind) + ["blind"] * arguments.blind
        run(take_part(JoinLink.parse(arguments.where), kinds))


if __name__ == "__main__":
    main()
