"""What a connection listens to: told to the hub on each new link, and known to have been refused where it was."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from potluck.errors import HubUnavailableError, PermissionDeniedError
from potluck.hub.connection import Handler
from potluck.hub.nats.dispatch import DispatchCounts, Dispatcher
from potluck.hub.nats.link import NatsLink
from potluck.hub.nats.subscription import NatsHubSubscription
from potluck.hub.patterns import check_pattern, check_subject

logger = logging.getLogger(__name__)


class Interests:
    """The subscriptions of one connection, in the order in which they were made."""

    def __init__(
        self, publish: Callable[[str, bytes], Awaitable[None]], *, backlog_messages: int, backlog_bytes: int
    ) -> None:
        """`publish` sends the handlers' answers; so much may wait for each handler."""
        self.counts = DispatchCounts()
        self._publish = publish
        self._backlog_messages = backlog_messages
        self._backlog_bytes = backlog_bytes
        self._subscriptions: dict[NatsHubSubscription, None] = {}

    def __len__(self) -> int:
        return len(self._subscriptions)

    async def add(
        self, subject: str, handler: Handler, queue: str, link: NatsLink | None, timeout_seconds: float
    ) -> NatsHubSubscription:
        """Listen from now on, or from the next link on; PermissionDeniedError when the hub says no."""
        check_pattern(subject)  # now, and not when it is told on the next link
        if queue:
            check_subject(queue)
        dispatcher = Dispatcher(
            subject,
            handler,
            self.counts,
            limit_messages=self._backlog_messages,
            limit_bytes=self._backlog_bytes,
        )
        subscription = NatsHubSubscription(
            subject,
            queue,
            dispatcher,
            publish=self._publish,
            limit_bytes=self._backlog_bytes,
            on_cancel=lambda cancelled: self._subscriptions.pop(cancelled, None),
        )
        self._subscriptions[subscription] = None
        try:
            if link is not None:
                await self._tell_now(subscription, link, timeout_seconds)
        except BaseException:
            await subscription.cancel()
            raise
        return subscription

    async def tell_all(self, link: NatsLink, timeout_seconds: float) -> None:
        """Have the hub know of all of them on a new link."""
        # More may be asked for while we wait.
        while untold := [each for each in self._subscriptions if not each.is_told_on(link)]:
            for subscription in untold:
                await subscription.tell(link)
            await link.round_trip(timeout_seconds)

    def deny(self, folded_subject: str) -> None:
        """The hub says that we may not listen there; it says so in lower case."""
        for subscription in self._subscriptions:
            if subscription.subject.lower() == folded_subject:
                subscription.denied = True

    async def cancel_all(self) -> None:
        """Listen to nothing any more."""
        for subscription in list(self._subscriptions):
            await subscription.cancel()

    async def _tell_now(self, subscription: NatsHubSubscription, link: NatsLink, timeout_seconds: float) -> None:
        try:
            if not subscription.is_told_on(link):
                await subscription.tell(link)
            await link.round_trip(timeout_seconds)
        except HubUnavailableError as error:
            logger.debug("the subscription to %s waits for the next connection: %s", subscription.subject, error)
        if subscription.denied:
            raise PermissionDeniedError(f"this member may not listen on {subscription.subject}")
