"""The guard: decides who may do what, and tells everyone who is there.

    reception.py       brings what is asked to the desk that answers
    door.py            which connections the hub lets in (auth callout)
    lobbydesk.py       applications: invites, tokens, waiting
    organiserdesk.py   what organisers ask for
    storedesk.py       stores that members read and coordinators write
    queuedesk.py       queues and topics: made, listed, purged
    presencekeeper.py  who is there: cards, beacons and connections in, the roster out
    floodwatch.py      who publishes so much that it has to go
    registry.py        the records that all of this is decided by
    hubsystem.py       the hub's events and lists of connections
    leaders.py         which servers of a cluster lead the stores

A guard keeps nothing of its own that matters: records and roster are in the hub's stores. So it can be restarted while
members go on, and several can run on a cluster. Questions that one answer is enough for go to one of them (a queue);
what concerns the roster all of them hear.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from potluck.clock import Clock, SystemClock
from potluck.errors import ConfigurationError, NotAdmittedError
from potluck.hub.access.application import Answer, waiting_subject
from potluck.hub.access.member import ROLES, AccessRequest, GroupRule, Member, Policy, Scopes, person_of_key
from potluck.hub.address import HubAddress
from potluck.hub.guard import huggingface
from potluck.hub.guard.backgroundwork import BackgroundWork
from potluck.hub.guard.connections import Connection, Connections, Lane
from potluck.hub.guard.door import Door, DoorLimits
from potluck.hub.guard.floodcore import QUEUE_LIMITS, FloodCore, FloodLimits, Traffic
from potluck.hub.guard.floodwatch import FloodWatch
from potluck.hub.guard.hubsystem import HubSystem
from potluck.hub.guard.leaders import LeaderKeeper
from potluck.hub.guard.lobbycrowd import LobbyCrowd, share_of_address
from potluck.hub.guard.lobbydesk import LobbyDesk
from potluck.hub.guard.organiserdesk import OrganiserDesk
from potluck.hub.guard.presencecore import PresenceConfig, PresenceCore
from potluck.hub.guard.presencekeeper import PresenceKeeper
from potluck.hub.guard.queuedesk import QueueDesk
from potluck.hub.guard.reception import Desks, Reception
from potluck.hub.guard.registry import Registry
from potluck.hub.guard.rosterwriter import RosterWriter
from potluck.hub.guard.storedesk import StoreDesk
from potluck.hub.keys import HubKeys, Signer
from potluck.hub.nats.connection import NatsConnection
from potluck.hub.presence import Presence
from potluck.hub.server.configuration import ACCOUNT
from potluck.hub.stores import ensure_stores
from potluck.hub.subjects import Subjects, check_run_name
from potluck.messages import encode

logger = logging.getLogger(__name__)

MAX_TASKS = 1024  # questions worked on at once; past it they go unanswered, and the peer asks again
LOBBY_EVERY_SECONDS = 1.0  # how often it is looked at who has to leave the lobby


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardConfig:
    """What a person can choose about a guard."""

    run: str
    """The run's name."""

    policy: Policy = field(default_factory=Policy)
    """Who may join the run at its first start; later, what organisers set holds."""

    groups: Mapping[str, GroupRule] | None = None
    """The groups that the run declares, from this start on; None: those that it has declared before."""

    presence: PresenceConfig = field(default_factory=PresenceConfig)
    """How long silence may last."""

    limits: DoorLimits = field(default_factory=DoorLimits)
    """How many connections there may be."""

    flood: FloodLimits = field(default_factory=FloodLimits)
    """How much a member may tell everybody."""

    huggingface_url: str = huggingface.DEFAULT_BASE_URL
    """The service that checks tokens."""

    huggingface_timeout_seconds: float = 8.0
    """How long that may take; an applicant waits meanwhile."""

    account: str = ACCOUNT
    """The NATS account of the run."""

    replicas: int = 1
    """On how many servers of a cluster each store is kept: 1, 3 or 5."""

    def __post_init__(self) -> None:
        check_run_name(self.run)
        huggingface.check_base_url(self.huggingface_url)
        if self.huggingface_timeout_seconds <= 0:
            raise ConfigurationError(f"huggingface_timeout_seconds is {self.huggingface_timeout_seconds}: more than 0")
        if self.replicas not in (1, 3, 5):
            raise ConfigurationError(f"{self.replicas} replicas: a majority needs an odd number, 1, 3 or 5")


class Guard:
    """One guard of one run."""

    def __init__(self, config: GuardConfig, keys: HubKeys, address: HubAddress, *, clock: Clock | None = None) -> None:
        self._config = config
        self._keys = keys
        self._address = address
        self._clock = clock or SystemClock()
        self._subjects = Subjects(config.run)
        self._connections = Connections()
        self._crowd = LobbyCrowd(config.limits.lobby)
        self._core = PresenceCore(config.presence, self._clock)
        self._compare_wanted = asyncio.Event()
        self._reception: Reception | None = None
        self._background = BackgroundWork(MAX_TASKS)
        self._counts: Counter[str] = Counter()
        self._hub: NatsConnection | None = None
        self._system_hub: NatsConnection | None = None
        self._queues_hub: NatsConnection | None = None
        self._registry: Registry | None = None
        self._writer: RosterWriter | None = None
        self._leaders: LeaderKeeper | None = None

    async def start(self) -> None:
        """Connect, load the records and the roster, and begin to answer. On failure everything is released again."""
        try:
            await self._connect()
            await self._begin()
        except BaseException:
            await self.stop()
            raise
        logger.info("the guard of %s answers", self._config.run)

    async def stop(self) -> None:
        """Answer no more; members stay connected. Idempotent."""
        await self._background.close()
        if self._reception is not None:
            await self._reception.close()
        if self._leaders is not None:
            await self._leaders.stop()
        if self._writer is not None:
            await self._writer.stop()
        if self._registry is not None:
            await self._registry.stop()
        for connection in (self._queues_hub, self._system_hub, self._hub):
            if connection is not None:
                await connection.close()

    def listen_requests(self, listener: Callable[[AccessRequest], None]) -> None:
        """Call `listener` for each peer that waits to be let in: those who do so now, and each that comes, once."""
        if self._registry is None:
            raise AssertionError("the guard is not started")
        told: set[str] = set()

        def changed(peer: str, request: AccessRequest | None) -> None:
            if request is None or request.denied:
                told.discard(peer)
            elif peer not in told:
                told.add(peer)
                listener(request)

        for request in self._registry.waiting():
            changed(request.peer, request)
        self._registry.requests.listen(changed)

    def statistics(self) -> Mapping[str, int | float]:
        """Counters since the start, and how things stand now."""
        if self._writer is None or self._registry is None or self._reception is None:
            return dict(self._counts)
        return {
            **self._counts,
            **self._reception.counts,
            **self._background.counts,
            **{f"door_{name}": count for name, count in self._door.counts.items()},
            **{f"lobby_{name}": count for name, count in self._lobby.counts.items()},
            **{f"organise_{name}": count for name, count in self._organisers.counts.items()},
            **self._keeper.counts,
            **sum((watch.counts for watch in self._floods), Counter()),
            **self._stores.counts,
            **(self._queues.counts if self._queues is not None else {}),
            "stray_beacons": self._core.num_stray_beacons,
            "roster_writes": self._writer.num_writes,
            "roster_conflicts": self._writer.num_conflicts,
            "invalid_records": self._registry.num_invalid() + self._writer.num_invalid,
            "invalid_events": self._system.num_invalid,
            "connections": len(self._connections),
            "roster": len(self._core),
            "members": len(self._registry.members),
            "waiting": len(self._registry.waiting()),
            "tasks": len(self._background),
        }

    # Beginning

    async def _connect(self) -> None:
        config, clock = self._config, self._clock
        self._hub = await NatsConnection.connect(
            self._address, seed=self._keys.guard_seed, run=config.run, name="guard", on_connected=self._came_back
        )
        self._system_hub = await NatsConnection.connect(
            self._address, seed=self._keys.system_seed, run=config.run, name="guard", on_connected=self._came_back
        )
        self._queues_hub = await self._connect_queues()
        await ensure_stores(self._hub, self._subjects, config.replicas)
        self._registry = registry = Registry(self._hub, self._background.spawn)
        self._writer = RosterWriter(self._hub.store("roster"), self._core)
        self._system = HubSystem(self._system_hub, config.account, clock)
        self._door = Door(
            registry,
            self._connections,
            subjects=self._subjects,
            account=config.account,
            signer=Signer(self._keys.account_seed),
            limits=config.limits,
            clock=clock,
        )
        self._lobby = LobbyDesk(registry, self._connections, self._door, self._check_token, clock, config.limits)
        self._keeper = PresenceKeeper(
            self._core,
            self._writer,
            registry,
            self._connections,
            self._system,
            self._door,
            run=config.run,
            limits=config.limits,
            clock=clock,
            spawn=self._background.spawn,
        )
        self._floods = [
            FloodWatch(FloodCore(limits, clock), self._system, self._keeper.connections_of, registry, clock, lane)
            for lane, limits in _limited_lanes(config.flood)
        ]
        self._organisers = OrganiserDesk(registry, self, clock)
        self._stores = StoreDesk(self._hub, self._subjects)
        queues_hub = self._queues_hub
        self._queues = QueueDesk(queues_hub, registry, config.run, config.replicas) if queues_hub is not None else None
        desks = Desks(
            door=self._door,
            lobby=self._lobby,
            keeper=self._keeper,
            organisers=self._organisers,
            stores=self._stores,
            queues=self._queues,
        )
        self._reception = Reception(self._subjects, desks, self._connections, self._background, clock)

    async def _connect_queues(self) -> NatsConnection | None:
        """Our connection in the queues' account; None on a server of somebody else's that has no such account."""
        try:
            return await NatsConnection.connect(
                self._address, seed=self._keys.queues_seed, run=self._config.run, name="guard"
            )
        except NotAdmittedError:
            logger.warning(
                "this hub's server has no account for queues, so there are none: add what its administrator was given "
                "for this run anew (`potluck host --help`, --hub)"
            )
            return None

    async def _begin(self) -> None:
        if self._hub is None or self._registry is None or self._writer is None or self._reception is None:
            raise AssertionError("the guard is not connected")
        await self._registry.start(self._config.policy)
        if self._config.groups is not None:
            await self._registry.declare_groups(self._config.groups)
        await self._registry.members.create(self._keys.organiser_public, self._organiser_record())
        await self._writer.start()
        await self._system.follow(self._connection_opened, self._keeper.closed, self._connection_counted)
        await self._keeper.compare_connections()
        self._core.was_deaf()
        await self._reception.open(self._hub, self._queues_hub)
        keeper = self._keeper
        self._background.keep_running(lambda: keeper.tick_forever(self._hears_hub), "presence ticks")
        self._background.keep_running(lambda: keeper.compare_forever(self._compare_wanted), "connection lists")
        for watch in self._floods:
            self._background.keep_running(watch.watch_forever, "floods")
        self._background.keep_running(self._watch_lobby_forever, "lobby")
        if self._config.replicas > 1:
            self._leaders = leaders = LeaderKeeper(self._hub, self._system, self._connections, self._subjects)
            await leaders.start()
            self._background.keep_running(leaders.keep_forever, "leaders of stores")

    def _organiser_record(self) -> Member:
        peer = self._keys.organiser_public
        scopes = Scopes(roles=ROLES, coordinates=True, trusted=True, organiser=True)
        return Member(
            peer=peer,
            person=person_of_key(peer),
            scopes=scopes,
            name="organiser",
            admitted_at=self._clock.wall(),
            admitted_by="host",
        )

    def _connection_opened(self, connection: Connection) -> None:
        self._keeper.opened(connection)
        if connection.lane == "lobby" and self._connections.count("lobby") > share_of_address(
            self._config.limits.lobby
        ):
            self._thin_out_lobby()
        if connection.lane == "main" and self._leaders is not None:
            self._leaders.opened(connection.peer)

    def _connection_counted(self, traffic: Traffic) -> None:
        for watch in self._floods:
            watch.closed(traffic)

    def _thin_out_lobby(self) -> None:
        strangers = self._connections.in_lane("lobby")
        for connection, reason in self._crowd.to_cut(strangers, self._lobby.may_stay, self._clock.monotonic()):
            self._counts["lobby_cuts"] += 1
            self._keeper.cut([connection], reason)

    async def _watch_lobby_forever(self) -> None:
        while True:
            await asyncio.sleep(LOBBY_EVERY_SECONDS)
            self._thin_out_lobby()

    def _came_back(self) -> None:
        """One of our connections was away: what was not heard meanwhile counts for nothing."""
        self._counts["reconnects"] += 1
        self._core.was_deaf()
        self._compare_wanted.set()

    def _hears_hub(self) -> bool:
        connections = (self._hub, self._system_hub)
        return all(connection is not None and connection.is_connected for connection in connections)

    # What the organisers' desk needs

    def presence_of(self, peer: str) -> Presence | None:
        """What the roster says of a peer."""
        return self._core.get(peer)

    async def tell_waiting(self, peer: str, answer: Answer) -> None:
        """Tell a peer in the lobby what was decided; if it is not there, it learns it when it comes again."""
        if self._hub is None:
            raise AssertionError("the guard is not connected")
        await self._hub.publish(waiting_subject(peer), encode(answer))

    def connections_of(self, target: str) -> list[Connection]:
        """The open connections of a peer or person, as far as they are known here."""
        return self._keeper.connections_of(target)

    async def cut_banned(self, target: str, known: Iterable[Connection]) -> int:
        """Cut the connections of a banned peer or person: those known, and others that it has; how many there were."""
        return await self._keeper.cut_banned(target, known)

    async def _check_token(self, token: str) -> huggingface.TokenAnswer:
        return await huggingface.whoami(
            token, base_url=self._config.huggingface_url, timeout_seconds=self._config.huggingface_timeout_seconds
        )


def _limited_lanes(main: FloodLimits) -> list[tuple[Lane, FloodLimits]]:
    """How much may be published on which lane."""
    return [("main", main), ("queue", QUEUE_LIMITS)]
