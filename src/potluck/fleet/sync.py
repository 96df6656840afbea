"""The fleet for programs: `connect(link)` for plain ones, `AsyncFleet` for those on asyncio.

with potluck.fleet.connect("potluck://…") as fleet:
    experience = fleet.queue("experience")
    experience.put({"reward": 1.0, "observations": observations})
    for item in experience.take(max_items=16, wait_seconds=5):
        learn(item.value)
        item.done()
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, overload

from potluck.errors import ConfigurationError
from potluck.fleet import queue as asynchronous
from potluck.fleet.member import FleetConfig, FleetMember
from potluck.fleet.queue import Queue
from potluck.fleet.topic import Topic, Version
from potluck.hub.access.application import Answer
from potluck.hub.joinlink import JoinLink, fetch_address
from potluck.hub.queues import QueueDepth
from potluck.peer import environment
from potluck.peer.identity import Identity
from potluck.run.calls import Call
from potluck.run.loopthread import LoopThread

T = TypeVar("T")


class AsyncFleet:
    """A fleet's queues and topics, on asyncio. An async context manager; made by `join`."""

    def __init__(self, member: FleetMember) -> None:
        self.member = member
        self._queues: dict[tuple[str, Any], Queue[Any]] = {}  # by name and kind
        self._topics: dict[tuple[str, Any], Topic[Any]] = {}

    @classmethod
    async def join(
        cls,
        link: str = "",
        *,
        identity: Identity | None = None,
        websocket_only: bool = False,
        on_waiting: Callable[[Answer], None] | None = None,
        **config: Any,
    ) -> AsyncFleet:
        """Connect by a join link (else POTLUCK_LINK)."""
        text = link or environment.link()
        if not text:
            raise ConfigurationError("which fleet? Give its join link, or set POTLUCK_LINK")
        parsed = JoinLink.parse(text)
        path = environment.identity_path()
        own = identity or (Identity.open(path) if path is not None else Identity.open_default())
        try:
            address = await fetch_address(parsed, websocket_only=websocket_only)
            options = FleetConfig(**{"invite": parsed.invite, **config})
        except BaseException:
            own.close()
            raise
        member = FleetMember(address, parsed.run, own, options)
        await member.open(on_waiting)
        return cls(member)

    @overload
    def queue(self, name: str) -> Queue[Any]: ...

    @overload
    def queue(self, name: str, kind: type[T]) -> Queue[T]: ...

    def queue(self, name: str, kind: Any = Any) -> Queue[Any]:
        """A queue by name; `kind` is the type that its items are checked against."""
        return self._queues.setdefault((name, kind), Queue(self.member, name, kind))

    @overload
    def topic(self, name: str) -> Topic[Any]: ...

    @overload
    def topic(self, name: str, kind: type[T]) -> Topic[T]: ...

    def topic(self, name: str, kind: Any = Any) -> Topic[Any]:
        """A topic by name; `kind` is the type that its items are checked against."""
        return self._topics.setdefault((name, kind), Topic(self.member, name, kind))

    async def list_queues(self) -> list[QueueDepth]:
        """The queues and topics that this member may use, and how full they are."""
        return await self.member.list_queues()

    async def close(self) -> None:
        """Give back what is held, and leave. Idempotent."""
        async with AsyncExitStack() as last_to_first:
            last_to_first.push_async_callback(self.member.close)
            for queue in self._queues.values():
                last_to_first.push_async_callback(queue.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Fleet:
    """A fleet's queues and topics, for the user's threads. A context manager; made by `connect`."""

    def __init__(self, link: str, config: dict[str, Any]) -> None:
        self._loop = LoopThread("potluck-fleet")
        self._loop.start()
        try:
            self._fleet = self._loop.call(AsyncFleet.join(link, **config))
        except BaseException:
            self._loop.close()
            raise
        self._is_open = True

    @property
    def peer_id(self) -> str:
        """By which the others know this member."""
        return self._fleet.member.peer

    @overload
    def queue(self, name: str) -> SyncQueue[Any]: ...

    @overload
    def queue(self, name: str, kind: type[T]) -> SyncQueue[T]: ...

    def queue(self, name: str, kind: Any = Any) -> SyncQueue[Any]:
        """A queue by name; `kind` is the type that its items are checked against."""
        return SyncQueue(self._loop, self._fleet.queue(name, kind))

    @overload
    def topic(self, name: str) -> SyncTopic[Any]: ...

    @overload
    def topic(self, name: str, kind: type[T]) -> SyncTopic[T]: ...

    def topic(self, name: str, kind: Any = Any) -> SyncTopic[Any]:
        """A topic by name; `kind` is the type that its items are checked against."""
        return SyncTopic(self._loop, self._fleet.topic(name, kind))

    def list_queues(self) -> list[QueueDepth]:
        """The queues and topics that this member may use, and how full they are."""
        return self._loop.call(self._fleet.list_queues())

    def in_background(self, work: Callable[[AsyncFleet], Coroutine[Any, Any, T]]) -> Call[T]:
        """Have something done on the fleet's event loop, without waiting for it."""
        return self._loop.submit(work(self._fleet))

    def close(self) -> None:
        """Give back what is held, and leave. Idempotent."""
        if self._is_open:
            self._is_open = False
            try:
                self._loop.call(self._fleet.close())
            finally:
                self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class SyncItem(Generic[T]):
    """Something taken from a queue."""

    def __init__(self, loop: LoopThread, item: asynchronous.Item[T]) -> None:
        self._loop = loop
        self._item = item
        self.id, self.value, self.putter, self.tries = item.id, item.value, item.putter, item.tries

    def done(self) -> None:
        """It is done: once this has returned, it never comes back."""
        self._loop.call(self._item.done())

    def again(self, after_seconds: float = 0.0) -> None:
        """Give it back: it is handed out again after that time."""
        self._loop.call(self._item.again(after_seconds))

    def __repr__(self) -> str:
        return repr(self._item)


class SyncQueue(Generic[T]):
    """A queue, for the user's threads: see `potluck.fleet.queue.Queue`."""

    def __init__(self, loop: LoopThread, queue: Queue[T]) -> None:
        self._loop = loop
        self._queue = queue
        self.name = queue.name

    def put(self, value: T, *, id: str = "", timeout_seconds: float | None = None) -> bool:  # noqa: A002
        """Put an item; returns when it is on the hub's disk. False when an item with this id was put before."""
        return self._loop.call(self._queue.put(value, id=id, timeout_seconds=timeout_seconds))

    def send(self, value: T, *, id: str = "") -> None:  # noqa: A002
        """Put an item in the background. QueueFullError when too much waits already."""
        self._loop.call(self._queue.send(value, id=id))

    def flush(self, timeout_seconds: float | None = None) -> None:
        """Wait until all that was sent is on the hub's disk."""
        self._loop.call(self._queue.flush(timeout_seconds))

    def take(self, max_items: int = 1, wait_seconds: float = 0.0) -> list[SyncItem[T]]:
        """Take up to so many items; waits up to `wait_seconds` for the first one, and not for more."""
        taken = self._loop.call(self._queue.take(max_items, wait_seconds))
        return [SyncItem(self._loop, item) for item in taken]

    def peek(self, max_items: int = 10, *, dead: bool = False) -> list[SyncItem[T]]:
        """Look at the oldest items, or at dead letters, without taking them."""
        return [SyncItem(self._loop, item) for item in self._loop.call(self._queue.peek(max_items, dead=dead))]

    def retry_dead(self) -> int:
        """Put all dead letters back into the queue; returns how many there were."""
        return self._loop.call(self._queue.retry_dead())


class SyncTopic(Generic[T]):
    """A topic, for the user's threads: see `potluck.fleet.topic.Topic`."""

    def __init__(self, loop: LoopThread, topic: Topic[T]) -> None:
        self._loop = loop
        self._topic = topic
        self.name = topic.name

    def publish(self, value: T) -> int:
        """Publish; returns the version's number when it is on the hub's disk."""
        return self._loop.call(self._topic.publish(value))

    def latest(self) -> Version[T] | None:
        """The newest item of all; None when nothing was published yet."""
        return self._loop.call(self._topic.latest())

    def follow(self) -> Iterator[Version[T]]:
        """The newest item, if there is one, and then each new one."""
        versions = self._topic.follow()
        try:
            while True:
                yield self._loop.call(_next_of(versions))
        finally:
            self._loop.call(_close(versions))


async def _next_of(versions: Any) -> Any:
    return await anext(versions)


async def _close(versions: Any) -> None:
    await versions.aclose()


def connect(link: str = "", **config: Any) -> Fleet:
    """Connect to a fleet's queues by a join link (else POTLUCK_LINK), as a context manager.

    `config` is what `potluck.fleet.member.FleetConfig` has, and `websocket_only` and `identity`.
    """
    return Fleet(link, config)
