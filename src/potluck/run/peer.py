"""A peer: through the lobby into the run, visible to the others, and linked to them.

admission ─▶ session (card, beacons, roster) ─▶ links over two carriers: direct and relay
                                 │                     ▲
                                 └── roster changes ───┘
reachability: somebody dials us back; what answers goes into the card, and we are a full peer
speeds: what the links measure goes into the card, so that rounds can be planned by it
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import potluck
from potluck import tasks
from potluck.clock import Clock, SystemClock
from potluck.errors import AccessError, ConfigurationError, ProtocolError, RetryableError
from potluck.hub.access.application import Answer, Application
from potluck.hub.address import HubAddress
from potluck.hub.bulk.wire import BulkWire, BulkWireConfig
from potluck.hub.joinlink import JoinLink
from potluck.hub.nats.connection import ConnectionConfig, NatsConnection
from potluck.hub.nats.linkkeeper import KeeperConfig
from potluck.hub.presence import Card, Role
from potluck.hub.subjects import MAIN, Subjects, check_group_name
from potluck.link.direct.addresses import default_listen, local_interfaces
from potluck.link.direct.carrier import DirectCarrier, DirectConfig
from potluck.link.direct.reachability import ReachabilityConfig
from potluck.link.direct.sockets import SocketSettings
from potluck.link.limits import LinkConfig
from potluck.link.links import Links
from potluck.link.relay.carrier import RelayCarrier
from potluck.messages import encode
from potluck.peer import environment
from potluck.peer.admission import be_admitted, why_refused
from potluck.peer.identity import Identity
from potluck.peer.organisers import checking
from potluck.peer.roster import RosterEvent
from potluck.peer.session import Session, new_session_id
from potluck.plaintext import check_plain
from potluck.run.linknews import TOPIC as LINK_NEWS
from potluck.run.linknews import link_news
from potluck.run.reachable import ReachabilityKeeper
from potluck.run.speedtest import SpeedTester

logger = logging.getLogger(__name__)

TELL_SPEED_EVERY_SECONDS = 10.0
SPEED_CHANGE = 1.25  # a measured speed is told anew when it has changed by this factor
# When the hub comes back, a peer must be there again before the guard gives it up (10 s), also when it came before the
# guard and was held up by that (5 s). Whether a refusal is final, the lobby is asked, so that is worth asking soon.
RETRY_WITHIN_SECONDS = 2.0
KEEPER = KeeperConfig(backoff_limit_seconds=RETRY_WITHIN_SECONDS, refusal_patience_seconds=1.0)
MEMBER_CONNECTION = ConnectionConfig(keeper=KEEPER, stores="guard")  # members use stores through the guard
WIRE = BulkWireConfig(backoff_limit_seconds=RETRY_WITHIN_SECONDS, refused_limit_seconds=RETRY_WITHIN_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConfig:
    """What a person can choose about a peer."""

    role: Role = "trainer"
    """What it does in the run."""

    name: str = field(default_factory=environment.person_name)
    """What its person wants to be called."""

    service: str = field(default_factory=environment.service)
    """Where it runs: kaggle, colab, cloud or local."""

    groups: tuple[str, ...] = (MAIN,)
    """The groups of the run that it is in from the start; it may enter others later."""

    link: JoinLink | None = field(default=None, repr=False)
    """The join link it comes by: that has the invite, and says whose manifest counts (organisers.py)."""

    invite: str = field(default="", repr=False)
    """The invite's secret, if no link has it; a member needs none."""

    token: str = field(default_factory=environment.huggingface_token, repr=False)
    """A Hugging Face token, shown to the guard when there is no invite."""

    message: str = ""
    """To the organisers, with a request for access."""

    wait_seconds: float = 0.0
    """How long to wait for an organiser's approval."""

    client_mode: bool = False
    """Only dial out, accept no links."""

    relay_only: bool = False
    """Send everything through the hub, also where a direct way exists; accept no links either."""

    websocket_only: bool = False
    """Reach the hub by WebSocket alone, as from networks that let only web traffic out."""

    listen: tuple[str, ...] = ()
    """Where to accept links, as tcp://HOST:PORT; any free port of every interface when empty."""

    announce: tuple[str, ...] = ()
    """Addresses to announce without a check, as tcp://HOST:PORT."""

    trusted_lan: bool = False
    """Send bulk bytes in the clear, which is three times faster: only where you trust everybody on the network."""

    links: LinkConfig = field(default_factory=LinkConfig)
    """Limits of the links."""

    def __post_init__(self) -> None:
        if not self.wait_seconds >= 0:
            raise ConfigurationError(f"wait_seconds is {self.wait_seconds}: it must be 0 or more")
        if self.relay_only and (self.listen or self.announce):
            raise ConfigurationError(
                "a peer that sends everything through the hub accepts no links: leave out --listen"
            )
        if len(set(self.groups)) != len(self.groups):
            raise ConfigurationError(f"groups={self.groups}: name each group once")
        for group in self.groups:
            check_group_name(group)
        self.reachability()
        try:
            check_plain(self.application())
        except ValueError as error:
            raise ConfigurationError(f"the hub would not take this: {error}. Shorten it") from error
        except ProtocolError as error:
            raise ConfigurationError(f"the hub would not take this: {error}") from error

    def reachability(self) -> ReachabilityConfig:
        """What it says about being reachable; ConfigurationError where that cannot be."""
        return ReachabilityConfig(
            listen=self.listen, announce=self.announce, client_mode=self.client_mode or self.relay_only
        )

    def application(self, *, is_temporary: bool = False) -> Application:
        """What this peer says at the lobby; `is_temporary`: it never comes again with this key."""
        invite = self.invite or (self.link.invite if self.link is not None else "")
        return Application(
            role=self.role,
            invite=invite,
            token="" if invite else self.token,  # no hub sees one that it has no need of
            name=self.name,
            service=self.service,
            version=potluck.__version__,
            message=self.message,
            # Who only looks has another key each time: a request would stand in the organisers' list for nobody.
            asks=self.role != "observer" or self.wait_seconds > 0,
            temporary=is_temporary,
        )


class Peer:
    """One process in a run."""

    def __init__(
        self, address: HubAddress, run: str, identity: Identity, config: PeerConfig, *, clock: Clock | None = None
    ) -> None:
        self.config = config
        self.identity = identity
        self.clock = clock or SystemClock()
        self._address = address
        self._subjects = Subjects(run)
        self._session_id = session_id = new_session_id()
        self.links = Links(identity.peer_id, session_id, self.clock, config.links)
        self.direct = DirectCarrier(
            peer=identity.peer_id,
            events=self.links,
            config=DirectConfig(listen=self._listen(), sockets=SocketSettings(trusted_lan=config.trusted_lan)),
            clock=self.clock,
        )
        self._wire = BulkWire(address, seed=identity.seed, config=WIRE)
        self.relay = RelayCarrier(
            self.links, identity.peer_id, self._subjects, self._wire, self.direct.keys, clock=self.clock
        )
        if not config.relay_only:
            self.links.add_carrier(self.direct)
        self.links.add_carrier(self.relay)
        card = Card(
            session=session_id,
            role=config.role,
            name=config.name,
            service=config.service,
            version=potluck.__version__,
            link_key=self.direct.link_key,
            upload_bytes_per_second=config.links.send_bytes_per_second,  # until it is measured
            download_bytes_per_second=config.links.receive_bytes_per_second,
            groups=config.groups,
        )
        self.session = Session(
            self._connect, identity, self._subjects, card, self.clock, check_organiser=checking(config.link)
        )
        self.reachability = ReachabilityKeeper(self.session, self.links, self.direct, config.reachability())
        self.speed_tester = SpeedTester(self.links, self.clock)
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    @property
    def peer_id(self) -> str:
        """By which the others know it."""
        return self.identity.peer_id

    async def start(self, on_waiting: Callable[[Answer], None] | None = None) -> None:
        """Get in, connect, and become reachable as far as possible. On failure everything is released again."""
        try:
            await be_admitted(
                self._connect,
                self._subjects,
                self.peer_id,
                self.config.application(is_temporary=self.identity.is_temporary),
                wait_seconds=self.config.wait_seconds,
                on_waiting=on_waiting,
            )
            if not self.config.relay_only:
                self.direct.start()
            await self.relay.start()
            self.session.roster.listen(self._roster_changed)
            await self.session.open()
            await self.reachability.start()
            self._tasks = [asyncio.create_task(self._tell_speeds(), name="speeds")]
        except BaseException:
            await self.close()
            raise

    @property
    def is_closed(self) -> bool:
        """Whether it leaves, or has left."""
        return self._closed

    async def close(self) -> None:
        """Leave the run and release everything. Idempotent."""
        if self._closed:
            return
        self._closed = True
        async with AsyncExitStack() as last_to_first:  # whatever fails, the rest is released
            last_to_first.callback(self.identity.close)
            last_to_first.push_async_callback(self.relay.close)
            last_to_first.push_async_callback(self.direct.close)
            last_to_first.push_async_callback(self.links.close)
            last_to_first.push_async_callback(self.session.close)
            last_to_first.push_async_callback(self.reachability.close)
            await tasks.end(*self._tasks)

    def _listen(self) -> tuple[str, ...]:
        if self.config.client_mode or self.config.relay_only:
            return ()
        return self.config.listen or default_listen(local_interfaces())

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
            seed=self.identity.seed,
            run=self._subjects.run,
            name=f"{lane}.{self._session_id}",  # by which the guard knows this process from another with the same key
            config=MEMBER_CONNECTION,
            on_connected=on_connected,
            on_disconnected=on_disconnected,
            on_refused=on_refused,
            why_refused=self._why_refused if lane == "main" else None,
        )

    async def _why_refused(self) -> AccessError | None:
        return await why_refused(
            self._connect,
            self._subjects,
            self.peer_id,
            self.config.application(is_temporary=self.identity.is_temporary),
        )

    def _roster_changed(self, event: RosterEvent) -> None:
        if event.peer == self.peer_id:
            self.direct.update_peer(event.presence)  # tells it where the hub sees us come from
        else:
            self.links.update_peer(event.presence)

    async def _tell_speeds(self) -> None:
        while True:
            await asyncio.sleep(TELL_SPEED_EVERY_SECONDS)
            total = self.links.statistics()
            card = self.session.card
            self.session.update_card(
                upload_bytes_per_second=_worth_telling(
                    card.upload_bytes_per_second,
                    _capped(total.upload_bytes_per_second, self.config.links.send_bytes_per_second),
                ),
                download_bytes_per_second=_worth_telling(
                    card.download_bytes_per_second,
                    _capped(total.download_bytes_per_second, self.config.links.receive_bytes_per_second),
                ),
            )
            try:
                news = encode(link_news(self.peer_id, total))
                await self.session.hub.publish(self._subjects.news(self.peer_id, LINK_NEWS), news)
            except RetryableError as error:  # told again in a few seconds
                logger.debug("the links were not told: %s", error)


def _capped(measured: float | None, most: float | None) -> float | None:
    """A measured speed, at most what this peer allows itself: bursts are faster, and nobody should count on them."""
    return measured if measured is None or most is None else min(measured, most)


def _worth_telling(told: float | None, measured: float | None) -> float | None:
    """The measured speed, if it differs enough from what everybody was told."""
    if measured is None or (told and 1 / SPEED_CHANGE < measured / told < SPEED_CHANGE):
        return told
    return measured
