"""What a process can do with a hub: the seam between Potluck and NATS.

`NatsConnection` (connection.py) is the real one; `potluck.sim.memoryhub` has the in-memory fake. One contract
suite, tests/unit/test_hub_contract.py, runs on both. All methods are called on the event loop that made the connection.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol


class Delivery(Protocol):
    """One message that arrived on a subscription."""

    @property
    def subject(self) -> str:
        """Where it was published; its tokens are checked by the hub, so they can be trusted."""
        ...

    @property
    def payload(self) -> bytes:
        """What was published: hostile until decoded."""
        ...

    @property
    def reply(self) -> str:
        """Where the sender wants its answer; empty when it wants none. The hub lets a sender name any subject here."""
        ...

    async def respond(self, payload: bytes) -> None:
        """Answer a request; does nothing when no answer was asked for."""
        ...


Handler = Callable[[Delivery], Awaitable[None] | None]


class Subscription(Protocol):
    """A live interest in a subject or a store."""

    async def cancel(self) -> None:
        """Stop delivery. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One version of one key of a store."""

    key: str
    value: bytes | None  # None: deleted or expired
    revision: int  # grows with every change of the store, over all keys
    written_at: float  # hub time, seconds since 1970


class Store(Protocol):
    """A small key-value table in the hub, with compare-and-set and watching."""

    async def get(self, key: str) -> Entry | None:
        """The newest version of a key; None when there is none or it was deleted."""
        ...

    async def entries(self, prefix: str = "") -> list[Entry]:
        """All live keys that start with `prefix`, which ends at a dot (or is empty)."""
        ...

    async def put(
        self, key: str, value: bytes, *, expected: int | None = None, ttl_seconds: float | None = None
    ) -> int:
        """Write a key and return its revision.

        With `expected`, only if the key's revision is that one (0: it must not exist), else RevisionConflictError. With
        `ttl_seconds` (whole seconds, at least 1) the hub deletes the key by itself, and watchers see that.
        """
        ...

    async def delete(self, key: str, *, expected: int | None = None) -> None:
        """Delete a key; a missing one is no error. `expected` as in `put`."""
        ...

    async def watch(self, handler: Callable[[Entry], None], prefix: str = "") -> Subscription:
        """Call `handler` for every live key, then for every change, each key's changes in order and none missed.

        Returns when the present keys have been told. After a reconnect the watch catches up by itself.
        """
        ...


class HubConnection(Protocol):
    """A connection to the hub, in one member's name."""

    @property
    def is_connected(self) -> bool:
        """Whether the hub can be reached right now."""
        ...

    async def publish(self, subject: str, payload: bytes) -> None:
        """Send to all subscribers. While disconnected: HubUnavailableError."""
        ...

    async def request(self, subject: str, payload: bytes, *, timeout_seconds: float) -> bytes:
        """Send and wait for one answer.

        DeadlineExceededError when none comes in time, HubUnavailableError when nobody listens there or the hub is away,
        PermissionDeniedError when this member may not publish there.
        """
        ...

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """Call `handler` for each message, in order. Of subscribers that share a `queue`, one gets each message.

        Returns when the hub knows of it: what is published after that arrives. PermissionDeniedError when this member
        may not listen there. While disconnected it takes effect on the next connection.
        """
        ...

    def store(self, name: str) -> Store:
        """The run's store of that name (see stores.py for which there are and who may use them)."""
        ...

    async def close(self) -> None:
        """Flush, then disconnect. Idempotent."""
        ...
