"""A hub in memory: the same connection as the real one, in one process and one event loop, and deterministic.

    hub = MemoryHub("my-run")
    alice = hub.connect("ALICE")
    hub.disconnect("ALICE")                       # and reconnect: subscriptions and watches go on
    late = hub.hold("p.my-run.plan.*")            # messages wait for late.release(); hub.drop loses them

Messages are delivered in later turns of the event loop, in the order in which they were published. Nothing takes real
time, except that a request that gets no answer waits for its deadline; keys expire by the clock given, if there is one.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from potluck.clock import Clock, SystemClock
from potluck.errors import (
    AccessError,
    HubUnavailableError,
)
from potluck.hub.guard.permissions import Permissions
from potluck.hub.patterns import covers
from potluck.hub.stores import STORES, StoreDefinition
from potluck.hub.subjects import Subjects
from potluck.sim.memoryconnection import MemoryConnection, MemoryReply, MemorySubscription
from potluck.sim.memorystore import MemoryTable
from potluck.sim.virtualclock import VirtualClock

logger = logging.getLogger(__name__)

MAX_PAYLOAD_BYTES = 1024 * 1024  # nats-server's own default
MAKE_STREAM = ("$JS.API.STREAM.CREATE.", "$JS.API.STREAM.UPDATE.")  # as ensure_stores asks for it


class MemoryRule:
    """What happens to messages on some subjects. Made by MemoryHub.drop and MemoryHub.hold."""

    def __init__(self, hub: MemoryHub, pattern: str, *, keep: bool, limit: int | None) -> None:
        self.num_caught = 0
        self._hub = hub
        self._pattern = pattern
        self._keep = keep
        self._limit = limit
        self._held: deque[Callable[[], None]] = deque()

    def release(self, count: int | None = None) -> None:
        """Deliver what is held, the oldest first: all of it, after which nothing more is held, or just so many."""
        if count is None:
            self.remove()
        for _ in range(len(self._held) if count is None else min(count, len(self._held))):
            self._held.popleft()()

    def remove(self) -> None:
        """Let messages pass from now on; what is held stays held."""
        if self in self._hub._rules:
            self._hub._rules.remove(self)

    def _catches(self, subject: str, deliver: Callable[[], None]) -> bool:
        if not covers(self._pattern, subject) or (self._limit is not None and self.num_caught >= self._limit):
            return False
        self.num_caught += 1
        if self._keep:
            self._held.append(deliver)
        return True


class MemoryHub:
    """The hub itself. Made and used in a running event loop."""

    def __init__(
        self, run: str = "test", *, clock: VirtualClock | None = None, stores: Iterable[StoreDefinition] = STORES
    ) -> None:
        """With a virtual clock, keys expire when it is moved; else in real time. `stores` exist from the start."""
        self.subjects = Subjects(run)
        self.clock: Clock = clock or SystemClock()
        self._virtual_clock = clock
        self.connections: list[MemoryConnection] = []
        self._rules: list[MemoryRule] = []
        self._tables: dict[str, MemoryTable] = {}
        self._turns: dict[str, int] = {}
        self._context = contextvars.copy_context()  # its timers are its own, also those that others cause
        for definition in stores:
            self.create_store(definition.name)

    def connect(
        self,
        peer: str,
        permissions: Permissions | None = None,
        *,
        on_connected: Callable[[], None] | None = None,
        on_disconnected: Callable[[], None] | None = None,
        on_refused: Callable[[AccessError], None] | None = None,
    ) -> MemoryConnection:
        """A new connection in a peer's name; without permissions, it may do everything."""
        connection = MemoryConnection(self, peer, permissions, on_connected, on_disconnected, on_refused)
        self.connections.append(connection)
        return connection

    def disconnect(self, peer: str | None = None) -> None:
        """Break the connections of a peer, or all."""
        for connection in self._connections_of(peer):
            connection._lose()

    def reconnect(self, peer: str | None = None) -> None:
        """Let a peer, or all, back in."""
        for connection in self._connections_of(peer):
            connection._restore()

    def refuse(self, peer: str) -> None:
        """Throw a peer out for good, as a ban does."""
        for connection in self._connections_of(peer):
            connection._lose()
            connection._refuse()

    def drop(self, pattern: str, count: int | None = None) -> MemoryRule:
        """Lose messages (also answers, and the changes of stores) on matching subjects: all, or the next `count`."""
        return self._add_rule(pattern, keep=False, limit=count)

    def hold(self, pattern: str, count: int | None = None) -> MemoryRule:
        """Keep such messages back until they are released."""
        return self._add_rule(pattern, keep=True, limit=count)

    def depose(self, store: str) -> None:
        """Leave a store without a leader, as when the server that led it dies: it can be read, and not written."""
        self.table(store).has_leader = False

    def elect(self, store: str) -> None:
        """Give a store a leader again; what should have expired meanwhile expires now."""
        self.table(store).lead()

    def remove_rules(self) -> None:
        """Let every message pass from now on."""
        self._rules.clear()

    def create_store(self, name: str) -> None:
        """Make a store; nothing happens if it exists."""
        self._tables.setdefault(self.subjects.stream(name), MemoryTable(self, name))

    def call_later(self, delay_seconds: float, callback: Callable[[], None]) -> None:
        """Call in so many seconds, by the hub's clock."""
        if self._virtual_clock is not None:
            self._virtual_clock.call_later(delay_seconds, callback)
        else:
            asyncio.get_running_loop().call_later(delay_seconds, callback, context=self._context)

    def table(self, name: str) -> MemoryTable:
        """The store of that name, or HubUnavailableError, as the real hub has it."""
        table = self._tables.get(self.subjects.stream(name))
        if table is None:
            raise HubUnavailableError(f"nobody answers for the store {name}: it does not exist")
        return table

    def deliver(self, subject: str, delivery: Callable[[], None]) -> None:
        """Let a message pass, unless a rule catches it."""
        if not any(rule._catches(subject, delivery) for rule in list(self._rules)):
            delivery()

    def _add_rule(self, pattern: str, *, keep: bool, limit: int | None) -> MemoryRule:
        rule = MemoryRule(self, pattern, keep=keep, limit=limit)
        self._rules.append(rule)
        return rule

    def _connections_of(self, peer: str | None) -> list[MemoryConnection]:
        found = [connection for connection in self.connections if peer in (None, connection.peer)]
        if not found:
            raise ValueError(f"{peer or 'nobody'} has no connection to this hub")
        return found

    def _listeners(self, subject: str) -> list[MemorySubscription]:
        return [
            subscription
            for connection in self.connections
            if connection.is_connected
            for subscription in connection._subscriptions
            if covers(subscription.subject, subject)
        ]

    def _receivers(self, subject: str) -> list[MemorySubscription]:
        """Who gets a message: every plain subscriber, and one of each queue, in turns."""
        receivers: list[MemorySubscription] = []
        queues: dict[str, list[MemorySubscription]] = {}
        for subscription in self._listeners(subject):
            (queues.setdefault(subscription.queue, []) if subscription.queue else receivers).append(subscription)
        for queue, members in queues.items():
            turn = self._turns[queue] = self._turns.get(queue, -1) + 1
            receivers.append(members[turn % len(members)])
        return receivers

    def _publish(self, subject: str, payload: bytes, reply: MemoryReply | None) -> bool:
        """Route a message; whether anybody listens."""
        if not self._listeners(subject):
            if reply is None or not subject.startswith(MAKE_STREAM):
                return False
            self._make_stream(payload)
            reply.arrive(msgspec.json.encode({"type": "stream"}))
            return True

        def route() -> None:
            for subscription in self._receivers(subject):
                subscription._arrive(subject, payload, reply)

        self.deliver(subject, route)
        return True

    def _make_stream(self, payload: bytes) -> None:
        name: str = msgspec.json.decode(payload)["name"]
        self.create_store(name.removeprefix(self.subjects.stream("")))
