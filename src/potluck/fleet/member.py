"""A member of a fleet: its connection to the queues' account, and requests to the guard.

What a connection may use is fixed when it is made. A queue that was made later needs a new connection, which is
opened here when somebody first asks for that queue.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec
from nats.aio.msg import Msg

import potluck
from potluck.errors import (
    AccessError,
    ConfigurationError,
    HubUnavailableError,
    PermissionDeniedError,
    QueueFullError,
    RetryableError,
)
from potluck.hub.access.application import Answer, Application
from potluck.hub.access.organise import read_answer
from potluck.hub.access.queueing import ListQueues, QueueList
from potluck.hub.address import HubAddress
from potluck.hub.connection import Handler, Subscription
from potluck.hub.nats.connection import ConnectionConfig, NatsConnection
from potluck.hub.nats.jetstream import UNAVAILABLE, JetStreamError
from potluck.hub.nats.requests import status_of
from potluck.hub.queues import QueueDefinition, QueueDepth, QueueSubjects, Right, check_queue_name
from potluck.hub.subjects import Subjects
from potluck.messages import Message, encode
from potluck.peer import environment
from potluck.peer.admission import be_admitted, why_refused
from potluck.peer.identity import Identity
from potluck.peer.session import new_session_id

logger = logging.getLogger(__name__)

REQUEST_SECONDS = 10.0
SLOWEST_BYTES_PER_SECOND = 64 * 1024  # of a line; what is on its way gets this much longer
RETRY_SECONDS = 0.25
LONGEST_RETRY_SECONDS = 2.0
STORE_FAILED = 10077  # the stream has as much as it may have
NO_ROOM = (STORE_FAILED, 10023, 10047, 10002)  # also: the account has, or the server has
NOT_FOUND = "404"
END_OF_BATCH = "204"

M = TypeVar("M", bound=Message)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """What a person can choose about a member of a fleet."""

    name: str = field(default_factory=environment.person_name)
    """What it is called in lists."""

    invite: str = field(default="", repr=False)
    """The invite's secret; a member needs none."""

    wait_seconds: float = 0.0
    """How long to wait for an organiser's approval."""

    patience_seconds: float = 60.0
    """How long `put`, `done` and the like wait through an outage of the hub."""

    buffer_bytes: int = 64 * 1024 * 1024
    """How much `send` may keep while the hub is away."""


class Write(msgspec.Struct, frozen=True):
    """What JetStream says to a write."""

    seq: int = 0
    duplicate: bool = False
    error: JetStreamError | None = None


class FleetMember:
    """One process in a fleet. Made by `connect`."""

    def __init__(self, address: HubAddress, run: str, identity: Identity, config: FleetConfig | None = None) -> None:
        config = config or FleetConfig()
        self.config = config
        self.peer = identity.peer_id
        self.subjects = QueueSubjects(run)
        self._address = address
        self._run_subjects = Subjects(run)
        self._identity = identity
        self._session_id = new_session_id()
        self._hub: NatsConnection | None = None
        self._opening = asyncio.Lock()
        self._failed: tuple[float, RetryableError] | None = None  # when the last look for a new queue began that failed
        self._depths: dict[str, QueueDepth] = {}
        self._usable: set[str] = set()  # queues and topics that there were when the connection was made
        self._listeners: dict[Listening, None] = {}
        self._writing_bytes = 0  # on their way to the hub, not answered yet

    async def open(self, on_waiting: Callable[[Answer], None] | None = None, *, is_member: bool = False) -> None:
        """Get in, unless this is a member already, and connect. On failure everything is released again."""
        try:
            if not is_member:
                await be_admitted(
                    self._connect,
                    self._run_subjects,
                    self.peer,
                    self._application(),
                    wait_seconds=self.config.wait_seconds,
                    on_waiting=on_waiting,
                )
            await self._reopen()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        hub, self._hub = self._hub, None
        if hub is not None:
            await hub.close()
        self._identity.close()

    @property
    def hub(self) -> NatsConnection:
        """The connection to the queues."""
        if self._hub is None:
            raise ConfigurationError("the fleet was left already: use it inside of `with potluck.fleet.connect(…)`")
        return self._hub

    async def list_queues(self) -> list[QueueDepth]:
        """The queues and topics that this member may use, and how full they are."""
        listed = (await self.ask("list", ListQueues(), QueueList)).items
        self._depths = {depth.definition.name: depth for depth in listed}
        return [*listed]

    async def definition(self, name: str, kind: Literal["queue", "topic"], right: Right) -> QueueDefinition:
        """One queue or topic that this member may use so; the error says what is missing."""
        check_queue_name(name)
        if name not in self._usable:
            asked_at = asyncio.get_running_loop().time()
            async with self._opening:  # of many that ask for it at once, one finds it for all
                if name not in self._usable:
                    await self._look_for(name, asked_at)
        depth = self._depths.get(name)
        if depth is None:
            known = ", ".join(sorted(self._depths)) or "none"
            raise ConfigurationError(
                f"there is no {kind} {name} that this member may use (it may use: {known}). An organiser makes one "
                f"with `potluck queue add {name}`, and names it in the invite (`potluck members invite --queue`)"
            )
        if depth.definition.kind != kind:
            raise ConfigurationError(f"{name} is a {depth.definition.kind}, not a {kind}")
        if right not in depth.rights:
            raise PermissionDeniedError(f"this member may not {right} on {name}: ask an organiser for an invite to")
        return depth.definition

    async def _look_for(self, name: str, asked_at: float) -> None:
        """Open a new connection, if a queue was made after this one. An outage is met once by all who asked before."""
        if self._failed is not None and self._failed[0] >= asked_at:
            raise self._failed[1]
        began = asyncio.get_running_loop().time()
        try:
            await self.list_queues()
            if name in self._depths:
                await self._reopen()
        except RetryableError as error:
            self._failed = began, error
            raise

    async def ask(self, verb: str, request: Message, kind: type[M]) -> M:
        """Ask the guard for something. Waits through outages."""
        subject, payload = self.subjects.ask(self.peer, verb), encode(request)
        data = await self._persist(lambda: self.hub.request(subject, payload, timeout_seconds=REQUEST_SECONDS))
        return read_answer(data, kind)

    async def write(
        self,
        name: str,
        subject: str,
        data: bytes,
        *,
        headers: dict[str, str] | None = None,
        first_headers: dict[str, str] | None = None,
    ) -> Write:
        """Have the hub keep a message; returns when it has. Waits through outages, but not for room.

        The first attempt has `first_headers` where they are given.
        """
        attempts = itertools.chain([first_headers or headers], itertools.repeat(headers))
        self._writing_bytes += len(data)
        try:
            answer = await self._persist(lambda: self._write(subject, data, next(attempts)))
        finally:
            self._writing_bytes -= len(data)
        if answer.error is None:
            return answer
        if answer.error.err_code in NO_ROOM:
            raise QueueFullError(f"{name} is full: {answer.error.description}")
        raise answer.error.explained(f"the hub does not take an item of {name}")

    async def _persist(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do something again and again while the hub is away, for as long as our patience lasts."""
        deadline = asyncio.get_running_loop().time() + self.config.patience_seconds
        pause_seconds = RETRY_SECONDS
        while True:
            try:
                return await work()
            except RetryableError as error:
                if asyncio.get_running_loop().time() + pause_seconds > deadline:
                    raise
                logger.info("the hub does not answer now, trying again: %s", error)
            await asyncio.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, LONGEST_RETRY_SECONDS)

    async def _write(self, subject: str, data: bytes, headers: dict[str, str] | None) -> Write:
        # All that is written goes over one line, one after the other.
        timeout_seconds = REQUEST_SECONDS + self._writing_bytes / SLOWEST_BYTES_PER_SECOND
        [message] = await self.hub.request_messages(subject, data, headers=headers, timeout_seconds=timeout_seconds)
        try:
            answer = msgspec.json.decode(message.data, type=Write)
        except msgspec.MsgspecError as error:
            raise HubUnavailableError(f"the hub's answer cannot be read: {error}") from error
        if answer.error is not None and answer.error.code == UNAVAILABLE and answer.error.err_code not in NO_ROOM:
            raise answer.error.explained("the hub cannot keep it now")
        return answer

    async def read_last(
        self, name: str, what: Literal["", "done", "part", "dead"], subjects: Sequence[str], most_bytes: int = 0
    ) -> dict[str, bytes]:
        """The newest message of each of these subjects, where there is one."""
        wanted = {"multi_last": list(subjects), "batch": len(subjects)}
        messages = await self.read(name, what, wanted, most_bytes)
        return {(message.headers or {}).get("Nats-Subject", ""): message.data for message in messages}

    async def read(
        self, name: str, what: Literal["", "done", "part", "dead"], wanted: dict[str, Any], most_bytes: int = 0
    ) -> list[Msg]:
        """Messages of a stream, without taking them; `most_bytes` is how much may come. Waits through outages."""
        messages = await self._persist(
            lambda: self.hub.request_messages(
                self.subjects.read(name, what),
                msgspec.json.encode(wanted),
                timeout_seconds=REQUEST_SECONDS + most_bytes / SLOWEST_BYTES_PER_SECOND,
                is_last=lambda message: bool(status_of(message)),
            )
        )
        end = messages.pop()
        if status_of(end) not in (NOT_FOUND, END_OF_BATCH):
            raise HubUnavailableError(f"the hub cannot show what is in {name}: {end.headers}")
        return messages

    async def listen(self, subject: str, handler: Handler, came_back: Callable[[], None]) -> Listening:
        """Call `handler` for each message on a subject, and `came_back` after each time that some may be missed."""
        listening = Listening(self._listeners, subject, handler, came_back)
        await listening.begin(self.hub)
        self._listeners[listening] = None
        return listening

    async def _reopen(self) -> None:
        """A new connection, with the rights of now; the one before is closed when nobody uses it any more."""
        hub = await self._connect(
            "queue", on_connected=self._came_back, on_refused=self._refused, why_refused=self._why_refused
        )
        before, self._hub = self._hub, hub
        self._usable = {depth.definition.name for depth in await self.list_queues()}
        for listening in list(self._listeners):
            await listening.begin(hub)
        if before is not None:
            await before.close()

    def _came_back(self) -> None:
        for listening in list(self._listeners):
            listening.came_back()

    def _refused(self, error: AccessError) -> None:
        logger.error("the hub does not let this member back in: %s", error)

    async def _why_refused(self) -> AccessError | None:
        return await why_refused(self._connect, self._run_subjects, self.peer, self._application())

    def _application(self) -> Application:
        return Application(
            role="worker",
            invite=self.config.invite,
            name=self.config.name,
            service=environment.service(),
            version=potluck.__version__,
        )

    async def _connect(self, lane: str, **callbacks: Any) -> NatsConnection:
        callbacks.pop("on_disconnected", None)
        return await NatsConnection.connect(
            self._address,
            seed=self._identity.seed,
            run=self.subjects.run,
            name=f"{lane}.{self._session_id}",
            config=ConnectionConfig(stores="guard"),
            **callbacks,
        )


class Listening:
    """One subscription, over whichever connection there is."""

    def __init__(
        self, among: dict[Listening, None], subject: str, handler: Handler, came_back: Callable[[], None]
    ) -> None:
        self._among = among
        self._subject = subject
        self._handler = handler
        self.came_back = came_back
        self._subscription: Subscription | None = None

    async def begin(self, hub: NatsConnection) -> None:
        """Listen on this connection; the one before ends by itself."""
        self._subscription = await hub.subscribe(self._subject, self._handler)
        self.came_back()

    async def cancel(self) -> None:
        """Listen no more. Idempotent."""
        self._among.pop(self, None)
        if self._subscription is not None:
            await self._subscription.cancel()
