"""The desk for queues and topics: makes them, says how full they are, and clears them away.

Items never come here: members put and take them straight at the hub (hub/queues.py). Requests come on
`q.RUN.ask.PEER.VERB`, where the hub lets only that peer publish; what it may do is looked up in its member record.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any

import msgspec

from potluck.errors import ConfigurationError, HubUnavailableError, PotluckError, ProtocolError, RetryableError
from potluck.hub.access.member import Member
from potluck.hub.access.organise import Done, Failure
from potluck.hub.access.queueing import CreateQueue, DeleteQueue, ForgetParts, ListQueues, Purged, PurgeQueue, QueueList
from potluck.hub.connection import Delivery, HubConnection
from potluck.hub.guard.registry import Registry
from potluck.hub.nats.jetstream import STREAM_NAME_IN_USE, JetStreamError
from potluck.hub.queues import (
    UNKNOWN,
    QueueDefinition,
    QueueDepth,
    QueueSubjects,
    Rights,
    check_item_id,
    check_queue_name,
    consumer_config,
    rights_on,
    stream_configs,
)
from potluck.hub.subjects import PEER_ID
from potluck.messages import Message, decode, encode

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 16 * 1024
TIMEOUT_SECONDS = 5.0
MAX_QUEUES = 200
MAX_MESSAGE_BYTES = 1024 * 1024 + 64 * 1024
NOT_FOUND = 404
NO_STORAGE = 10047


class _StreamState(msgspec.Struct):
    messages: int = 0
    bytes: int = 0
    first_ts: str = ""
    last_seq: int = 0
    subjects: dict[str, int] | None = None


class _Info(msgspec.Struct):
    state: _StreamState = msgspec.field(default_factory=_StreamState)
    num_ack_pending: int = 0
    purged: int = 0
    error: JetStreamError | None = None


class QueueDesk:
    """Answers requests about queues, over the guard's connection in their account."""

    def __init__(self, hub: HubConnection, registry: Registry, run: str, replicas: int) -> None:
        self._hub = hub
        self._registry = registry
        self._subjects = QueueSubjects(run)
        self._replicas = replicas
        self.counts: Counter[str] = Counter()
        self._verbs: dict[str, tuple[Any, Callable[[Member, Any], Awaitable[Message]]]] = {
            "list": (ListQueues, self._list),
            "create": (CreateQueue, self._create),
            "delete": (DeleteQueue, self._delete),
            "purge": (PurgeQueue, self._purge),
            "forget": (ForgetParts, self._forget),
        }

    async def answer(self, delivery: Delivery) -> None:
        """Answer one request."""
        peer, _, verb = delivery.subject.removeprefix(f"{self._subjects.root}.ask.").partition(".")
        try:
            answer = await self._answer(peer, verb, delivery.payload)
            self.counts["queue_requests"] += 1
        except (ProtocolError, ConfigurationError) as error:
            answer = Failure(kind="input", message=str(error))
        except RetryableError as error:
            answer = Failure(kind="later", message=str(error))
        await delivery.respond(encode(answer))

    async def _answer(self, peer: str, verb: str, payload: bytes) -> Message:
        member = await self._registry.member(peer)
        if member is None or self._registry.is_banned(member):
            return Failure(kind="forbidden", message="this peer is not a member of the run")
        if verb not in self._verbs:
            raise ConfigurationError(f"there is no request {verb[:40]!r}: this hub may be older than your potluck")
        kind, handle = self._verbs[verb]
        return await handle(member, decode(kind, payload, limit_bytes=MAX_REQUEST_BYTES))

    async def _list(self, member: Member, _request: ListQueues) -> Message:
        rights = member.scopes.queue_rights
        mine = [each for each in self._registry.queues if rights_on(rights, each.name)]
        depths = await asyncio.gather(*(self._depth(each, rights) for each in sorted(mine, key=lambda q: q.name)))
        return QueueList(items=tuple(depths))

    async def _depth(self, definition: QueueDefinition, rights: Rights) -> QueueDepth:
        stream = self._subjects.stream(definition.name)
        items, parts = await self._info(stream), await self._info(f"{stream}_part")
        depth = QueueDepth(
            definition=definition,
            items=items.state.messages,
            bytes=items.state.bytes,
            parts_bytes=parts.state.bytes,
            num_put=items.state.last_seq,
            oldest_at=_seconds(items.state.first_ts) if items.state.messages else 0.0,
            rights=rights_on(rights, definition.name),
        )
        if definition.kind == "topic":
            return depth
        consumer = await self._ask(f"CONSUMER.INFO.{stream}.take")
        dead, done = await self._info(f"{stream}_dead"), await self._info(f"{stream}_done")
        return msgspec.structs.replace(
            depth,
            out=consumer.num_ack_pending,
            dead=dead.state.messages,
            done=done.state.messages,
            # Among several servers what was handed out is not known for certain after any of them has died.
            newest=items.state.last_seq if self._replicas == 1 else UNKNOWN,
        )

    async def _create(self, member: Member, request: CreateQueue) -> Message:
        definition = request.definition
        _only_organisers(member)
        known = self._registry.queues.get(definition.name)
        if known is not None and known.kind != definition.kind:
            raise ConfigurationError(f"{definition.name} is a {known.kind} already: choose another name, or delete it")
        if known is None and len(self._registry.queues) >= MAX_QUEUES:
            raise ConfigurationError(f"there are {MAX_QUEUES} queues and topics already: delete one first")
        for config in stream_configs(definition, self._subjects, self._replicas, MAX_MESSAGE_BYTES):
            await self._make_stream(config)
        if definition.kind == "queue":
            stream = self._subjects.stream(definition.name)
            request_body = {"stream_name": stream, "config": consumer_config(definition)}
            _raise(await self._ask(f"CONSUMER.DURABLE.CREATE.{stream}.take", request_body), definition.name)
        await self._registry.queues.put(definition.name, definition)
        return Done()

    async def _delete(self, member: Member, request: DeleteQueue) -> Message:
        _only_organisers(member)
        definition = self._known(request.name)
        await self._registry.queues.remove(definition.name)  # first: nobody is let in to a queue that is half gone
        for config in stream_configs(definition, self._subjects, self._replicas, MAX_MESSAGE_BYTES):
            _raise(await self._ask(f"STREAM.DELETE.{config['name']}"), definition.name, missing_is_fine=True)
        return Done()

    async def _purge(self, member: Member, request: PurgeQueue) -> Message:
        if not request.dead or "take" not in rights_on(member.scopes.queue_rights, request.name):
            _only_organisers(member)
        definition = self._known(request.name)
        stream = self._subjects.stream(definition.name)
        if request.dead and definition.kind == "topic":
            raise ConfigurationError(f"{definition.name} is a topic: it has no dead letters")
        wanted = {"seq": request.up_to + 1} if request.up_to else None  # JetStream purges what is below it
        answer = await self._ask(f"STREAM.PURGE.{stream}{'_dead' if request.dead else ''}", wanted)
        _raise(answer, definition.name)
        if not request.dead and not request.up_to:
            _raise(await self._ask(f"STREAM.PURGE.{stream}_part"), definition.name)
        return Purged(items=answer.purged)

    async def _forget(self, member: Member, request: ForgetParts) -> Message:
        definition = self._known(request.name)
        if "take" not in rights_on(member.scopes.queue_rights, definition.name) and member.peer != request.putter:
            return Failure(kind="forbidden", message=f"this peer has no right on {definition.name}")
        if not PEER_ID.fullmatch(request.putter) or check_item_id(request.item) != request.item:
            raise ConfigurationError("these are not the parts of an item")
        items = [request.item]
        if request.others:
            items = [item for item in await self._items_with_parts(definition.name, request.putter) if item != items[0]]
        purged = 0
        for item in items:
            parts = self._subjects.part(definition.name, request.putter, item, "*")
            answer = await self._ask(f"STREAM.PURGE.{self._subjects.stream(definition.name)}_part", {"filter": parts})
            _raise(answer, definition.name)
            purged += answer.purged
        return Purged(items=purged)

    async def _items_with_parts(self, name: str, putter: str) -> list[str]:
        wanted = {"subjects_filter": self._subjects.part(name, putter, "*", "*")}
        found = (await self._ask(f"STREAM.INFO.{self._subjects.stream(name)}_part", wanted)).state.subjects
        return list(dict.fromkeys(subject.split(".")[-2] for subject in found or ()))

    def _known(self, name: str) -> QueueDefinition:
        definition = self._registry.queues.get(check_queue_name(name))
        if definition is None:
            raise ConfigurationError(f"there is no queue or topic {name}: `potluck queue ls` lists them")
        return definition

    async def _make_stream(self, config: dict[str, Any]) -> None:
        answer = await self._ask(f"STREAM.CREATE.{config['name']}", config)
        if answer.error is not None and answer.error.err_code == STREAM_NAME_IN_USE:
            answer = await self._ask(f"STREAM.UPDATE.{config['name']}", config)
        _raise(answer, config["name"])

    async def _info(self, stream: str) -> _Info:
        return await self._ask(f"STREAM.INFO.{stream}")

    async def _ask(self, what: str, body: dict[str, Any] | None = None) -> _Info:
        payload = msgspec.json.encode(body) if body is not None else b""
        data = await self._hub.request(f"$JS.API.{what}", payload, timeout_seconds=TIMEOUT_SECONDS)
        try:
            return msgspec.json.decode(data, type=_Info)
        except msgspec.MsgspecError as error:
            raise HubUnavailableError(f"the hub's answer about a queue cannot be read: {error}") from error


def _raise(answer: _Info, name: str, *, missing_is_fine: bool = False) -> None:
    if answer.error is None or (missing_is_fine and answer.error.code == NOT_FOUND):
        return
    if answer.error.err_code == NO_STORAGE:
        raise ConfigurationError(
            f"the hub has no room for {name}: all queues together may take so much of its disk. Choose a smaller "
            "max_bytes, delete a queue, or have the host allow more (HubConfig.max_queue_bytes)"
        )
    error: PotluckError = answer.error.explained(f"the hub does not do this with {name}")
    raise error


def _only_organisers(member: Member) -> None:
    if not member.scopes.organiser:
        raise ConfigurationError("only an organiser of the run may make, purge or delete queues: ask one")


def _seconds(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0
