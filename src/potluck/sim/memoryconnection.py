"""A member's connection to a MemoryHub."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from potluck.errors import (
    AccessError,
    ConfigurationError,
    DeadlineExceededError,
    HubUnavailableError,
    NobodyAnswersError,
    NotAdmittedError,
    PermissionDeniedError,
)
from potluck.hub.connection import Handler
from potluck.hub.guard.permissions import Permissions
from potluck.hub.nats.dispatch import BACKLOG_BYTES, BACKLOG_MESSAGES, DispatchCounts, Dispatcher
from potluck.hub.patterns import check_pattern, check_subject, covers
from potluck.hub.subjects import Subjects
from potluck.sim.memorystore import MemoryStore, MemoryWatch

if TYPE_CHECKING:
    from potluck.sim.memoryhub import MemoryHub

MAX_PAYLOAD_BYTES = 1024 * 1024  # nats-server's own default


class MemoryReply:
    """Where the answer to one request goes."""

    def __init__(self, hub: MemoryHub, connection: MemoryConnection, number: int) -> None:
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.subject = f"{Subjects.inbox(connection.peer)}.{number}"
        self._hub = hub

    def send(self, payload: bytes) -> None:
        """Answer, in a later turn of the loop."""
        self._hub.deliver(self.subject, lambda: self.arrive(payload))

    def arrive(self, payload: bytes) -> None:
        """Take in the first answer; later ones are dropped."""

        def resolve() -> None:
            if not self.answer.done():
                self.answer.set_result(payload)

        asyncio.get_running_loop().call_soon(resolve)

    def fail(self, reason: str) -> None:
        """No answer will come."""
        if not self.answer.done():
            self.answer.set_exception(HubUnavailableError(reason))


class MemoryDelivery:
    """One message that arrived."""

    def __init__(self, connection: MemoryConnection, subject: str, payload: bytes, reply: MemoryReply | None) -> None:
        self.subject = subject
        self.payload = payload
        self._connection = connection
        self._reply = reply

    @property
    def reply(self) -> str:
        """Where the sender wants its answer."""
        return self._reply.subject if self._reply is not None else ""

    async def respond(self, payload: bytes) -> None:
        """Answer a request; does nothing when no answer was asked for."""
        self._connection._check_usable()
        if self._reply is not None:
            self._reply.send(payload)


class MemorySubscription:
    """A live interest in a subject."""

    def __init__(self, connection: MemoryConnection, subject: str, queue: str, dispatcher: Dispatcher) -> None:
        self.subject = subject
        self.queue = queue
        self._connection = connection
        self._dispatcher = dispatcher

    async def cancel(self) -> None:
        """Stop delivery. Idempotent."""
        self._connection._subscriptions.pop(self, None)
        await self._dispatcher.close()

    def _arrive(self, subject: str, payload: bytes, reply: MemoryReply | None) -> None:
        delivery = MemoryDelivery(self._connection, subject, payload, reply)
        self._connection._soon(lambda: self._dispatcher.offer(delivery))


class MemoryConnection:
    """A HubConnection to a MemoryHub. Made by MemoryHub.connect."""

    def __init__(
        self,
        hub: MemoryHub,
        peer: str,
        permissions: Permissions | None,
        on_connected: Callable[[], None] | None,
        on_disconnected: Callable[[], None] | None,
        on_refused: Callable[[AccessError], None] | None,
    ) -> None:
        self.hub = hub
        self.peer = peer
        self.is_connected = True
        self.closed_error: AccessError | None = None
        self.dispatched = DispatchCounts()
        self.backlog_messages = BACKLOG_MESSAGES
        self.backlog_bytes = BACKLOG_BYTES
        self._permissions = permissions
        self._on_connected = on_connected
        self._on_disconnected = on_disconnected
        self._on_refused = on_refused
        self._subscriptions: dict[MemorySubscription, None] = {}
        self._watches: dict[MemoryWatch, None] = {}
        self._replies: dict[MemoryReply, None] = {}  # in the order in which they were asked for
        self._reply_numbers = itertools.count()
        self._life = 0  # grows with every loss: what was on its way to us then never arrives
        self._closed = False
        self._context = contextvars.copy_context()  # what arrives belongs to the maker of the connection
        self._counts = {
            "published": 0,
            "published_bytes": 0,
            "requests": 0,
            "permission_violations": 0,
            "reconnects": 0,
        }

    async def publish(self, subject: str, payload: bytes) -> None:
        """Send to all subscribers; on a forbidden subject it is counted, as with the real hub."""
        self._check_usable()
        self._check_sendable(subject, payload)
        self._counts["published"] += 1
        self._counts["published_bytes"] += len(payload)
        if self.may_publish(subject):
            self.hub._publish(subject, payload, None)

    async def request(self, subject: str, payload: bytes, *, timeout_seconds: float) -> bytes:
        """Send and wait for one answer; the errors are those of HubConnection."""
        self._check_usable()
        self._check_sendable(subject, payload)
        self._counts["requests"] += 1
        if not self.may_publish(subject):
            raise PermissionDeniedError(f"this member may not publish on {subject}")
        reply = MemoryReply(self.hub, self, next(self._reply_numbers))
        self._replies[reply] = None
        try:
            if not self.hub._publish(subject, payload, reply):
                raise NobodyAnswersError(f"nobody answers on {subject}: nothing is there that should")
            async with asyncio.timeout(timeout_seconds) as deadline:
                return await reply.answer
        except TimeoutError:
            if not deadline.expired():
                raise
            raise DeadlineExceededError(f"no answer on {subject} within {timeout_seconds:g} s") from None
        finally:
            self._replies.pop(reply, None)

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> MemorySubscription:
        """Call `handler` for each message, in order."""
        if self._closed or self.closed_error is not None:
            self._check_usable()
        self.check_may_listen(check_pattern(subject))
        if queue:
            check_subject(queue)
        dispatcher = Dispatcher(
            subject,
            handler,
            self.dispatched,
            limit_messages=self.backlog_messages,
            limit_bytes=self.backlog_bytes,
        )
        subscription = MemorySubscription(self, subject, queue, dispatcher)
        self._subscriptions[subscription] = None
        return subscription

    def store(self, name: str) -> MemoryStore:
        """The run's store of that name."""
        return MemoryStore(self, name)

    def statistics(self) -> Mapping[str, int | float]:
        """Counters, by the names that the real connection uses."""
        return {
            **self._counts,
            "handled": self.dispatched.handled,
            "handler_errors": self.dispatched.handler_errors,
            "dropped": self.dispatched.dropped,
            "connected": int(self.is_connected),
            "pending_requests": len(self._replies),
            "subscriptions": len(self._subscriptions),
            "watches": len(self._watches),
        }

    async def close(self) -> None:
        """Disconnect for good. Idempotent."""
        self._closed = True
        self.is_connected = False
        for watch in list(self._watches):
            await watch.cancel()
        for subscription in list(self._subscriptions):
            await subscription.cancel()
        for reply in list(self._replies):
            reply.fail("the connection was closed")
        if self in self.hub.connections:
            self.hub.connections.remove(self)

    # For the stores, which obey the same permissions

    def may_publish(self, *subjects: str) -> bool:
        """Whether this member may publish on any of these subjects; if not, it is counted."""
        if self._permissions is None:
            return True
        for pattern in self._permissions.publish:
            if any(covers(pattern, subject) for subject in subjects):
                return True
        self._counts["permission_violations"] += 1
        return False

    def check_may_listen(self, subject: str) -> None:
        """PermissionDeniedError if this member may not listen there."""
        if self._permissions is None or any(covers(pattern, subject) for pattern in self._permissions.subscribe):
            return
        self._counts["permission_violations"] += 1
        raise PermissionDeniedError(f"this member may not listen on {subject}")

    # What the hub does to it

    def _lose(self) -> None:
        if not self.is_connected:
            return
        self.is_connected = False
        self._life += 1
        for reply in self._replies:
            reply.fail("the connection to the hub was lost")
        if self._on_disconnected is not None:
            self._context.copy().run(self._on_disconnected)

    def _restore(self) -> None:
        if self.is_connected or self._closed or self.closed_error is not None:
            return
        self.is_connected = True
        self._counts["reconnects"] += 1
        for watch in self._watches:
            self._soon(watch.sync)
        if self._on_connected is not None:
            self._context.copy().run(self._on_connected)

    def _refuse(self) -> None:
        self.closed_error = NotAdmittedError("the hub does not let this identity in")
        if self._on_refused is not None:
            self._on_refused(self.closed_error)

    def _soon(self, action: Callable[[], None]) -> None:
        """Do it in a later turn of the loop, unless the connection is lost before."""
        life = self._life

        def act() -> None:
            if life == self._life and not self._closed:
                action()

        asyncio.get_running_loop().call_soon(act, context=self._context)

    def _check_usable(self) -> None:
        if self.closed_error is not None:
            raise NotAdmittedError(str(self.closed_error))
        if self._closed or not self.is_connected:
            raise HubUnavailableError("the hub is away just now")

    @staticmethod
    def _check_sendable(subject: str, payload: bytes) -> None:
        check_subject(subject)
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise ConfigurationError(
                f"a message of {len(payload)} bytes on {subject} exceeds the hub's limit of {MAX_PAYLOAD_BYTES}"
            )
