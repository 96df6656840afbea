"""What arrives from the hub: a message, and the interest that brings it, which outlives the link it is told on."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from potluck.errors import HubUnavailableError
from potluck.hub.nats.dispatch import Dispatcher
from potluck.hub.nats.link import NatsLink

logger = logging.getLogger(__name__)

Publish = Callable[[str, bytes], Awaitable[None]]


class NatsDelivery:
    """One message that arrived."""

    __slots__ = ("_message", "_publish")

    def __init__(self, message: Msg, publish: Publish) -> None:
        self._message = message
        self._publish = publish

    @property
    def subject(self) -> str:
        """Where it was published."""
        return self._message.subject

    @property
    def payload(self) -> bytes:
        """What was published."""
        return self._message.data

    @property
    def headers(self) -> Mapping[str, str]:
        """What the hub wrote beside it, and what the sender did."""
        return self._message.headers or {}

    @property
    def reply(self) -> str:
        """Where the sender wants its answer."""
        return self._message.reply

    async def respond(self, payload: bytes) -> None:
        """Answer a request; does nothing when no answer was asked for."""
        if self._message.reply:
            await self._publish(self._message.reply, payload)


class NatsHubSubscription:
    """A live interest in a subject. Made by NatsConnection.subscribe."""

    def __init__(
        self,
        subject: str,
        queue: str,
        dispatcher: Dispatcher,
        *,
        publish: Publish,
        limit_bytes: int,
        on_cancel: Callable[[NatsHubSubscription], None],
    ) -> None:
        self.subject = subject
        self.denied = False
        """Whether the hub says that this member may not listen there."""
        self._queue = queue
        self._dispatcher = dispatcher
        self._publish = publish
        self._limit_bytes = limit_bytes
        self._on_cancel = on_cancel
        self._link: NatsLink | None = None
        self._on_link: NatsSubscription | None = None

    def is_told_on(self, link: NatsLink) -> bool:
        """Whether the hub knows of it through this link."""
        return self._link is link

    async def tell(self, link: NatsLink) -> None:
        """Ask for the messages on a new link."""
        self.denied = False
        self._link = link
        on_link = await link.subscribe(self.subject, self._queue, self._arrived, limit_bytes=self._limit_bytes)
        if self._link is link:
            self._on_link = on_link
        else:  # cancelled meanwhile
            await link.unsubscribe(on_link)

    async def cancel(self) -> None:
        """Stop delivery. Idempotent."""
        self._on_cancel(self)
        await self._dispatcher.close()
        link, on_link = self._link, self._on_link
        self._link = self._on_link = None
        if link is not None and on_link is not None:
            try:
                await link.unsubscribe(on_link)
            except HubUnavailableError as error:
                logger.debug("the hub has forgotten the subscription to %s by itself: %s", self.subject, error)

    async def _arrived(self, message: Msg) -> None:
        self._dispatcher.offer(NatsDelivery(message, self._publish))
