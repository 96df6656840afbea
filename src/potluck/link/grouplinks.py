"""The links of this peer as one group uses them: the same links, with the group in front of each kind of message.

    critic = GroupLinks(links, "critic")
    critic.handle(Greeting, greeted)     # hears what others send by their GroupLinks of "critic", and nothing else

So that rounds and states of many groups share the links and their limits, and one of them need not know of the others.
"""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any, TypeVar

from potluck.link.carrier import Buffer
from potluck.link.channel.sendreceipt import SendReceipt
from potluck.link.dispatch import Handler, Incoming
from potluck.link.links import Links
from potluck.link.sendqueue import SendQueue
from potluck.link.stream import Stream
from potluck.link.streams import StreamHandler
from potluck.messages import Message

M = TypeVar("M", bound=Message)


class GroupLinks:
    """Handlers and messages of one group."""

    def __init__(self, links: Links, group: str = "") -> None:
        """`group` is a token of the wire: empty for the run's main group."""
        self.group = group
        self._links = links
        self._handled: list[type[Message]] = []

    def handle(self, kind: type[M], handler: Handler[M]) -> None:
        """As `Links.handle`."""
        self._links.handle(kind, handler, group=self.group)
        self._handled.append(kind)

    def handle_stream(self, kind: type[Message], handler: StreamHandler) -> None:
        """As `Links.handle_stream`."""
        self._links.handle_stream(kind, handler, group=self.group)
        self._handled.append(kind)

    async def send(
        self, peer: str, message: Message, frames: Sequence[Buffer] = (), *, timeout_seconds: float, bulk: bool = False
    ) -> SendReceipt:
        """As `Links.send`."""
        return await self._links.send(
            peer, message, frames, timeout_seconds=timeout_seconds, bulk=bulk, group=self.group
        )

    def queue_to(self, peer: str) -> SendQueue:
        """As `Links.queue_to`, for what sends much: name the group with each message."""
        return self._links.queue_to(peer)

    def request(
        self,
        peer: str,
        message: Message,
        frames: Sequence[Buffer] = (),
        *,
        reply: type[M],
        timeout_seconds: float,
        bulk: bool = False,
    ) -> Coroutine[Any, Any, Incoming[M]]:
        """As `Links.request`."""
        return self._links.request(
            peer, message, frames, reply=reply, timeout_seconds=timeout_seconds, bulk=bulk, group=self.group
        )

    def open_stream(
        self, peer: str, message: Message, frames: Sequence[Buffer] = (), *, timeout_seconds: float
    ) -> Coroutine[Any, Any, Stream]:
        """As `Links.open_stream`."""
        return self._links.open_stream(peer, message, frames, timeout_seconds=timeout_seconds, group=self.group)

    def flush(self, peer: str, *, timeout_seconds: float) -> Awaitable[None]:
        """As `Links.flush`: also what other groups have queued for the peer."""
        return self._links.flush(peer, timeout_seconds=timeout_seconds)

    def arrived_at(self, peer: str, *, bulk: bool) -> float:
        """As `Links.arrived_at`: of all groups, since it tells whether the line moves."""
        return self._links.arrived_at(peer, bulk=bulk)

    def delivered_at(self, peer: str, *, bulk: bool) -> float:
        """As `Links.delivered_at`, of all groups."""
        return self._links.delivered_at(peer, bulk=bulk)

    def upload_bytes_per_second(self, peer: str) -> float | None:
        """As `Links.upload_bytes_per_second`."""
        return self._links.upload_bytes_per_second(peer)

    def close(self) -> None:
        """Handle nothing more for this group. Idempotent."""
        while self._handled:
            self._links.unhandle(self._handled.pop(), group=self.group)
