"""What a pipeline's conductor says about it, as it comes in. Shown, never trusted: it is bounded, and text is text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from potluck.errors import ProtocolError
from potluck.hub.connection import Delivery, Subscription
from potluck.messages import decode
from potluck.peer.session import Session
from potluck.plaintext import clean_all
from potluck.training.staged.overview import OVERVIEW_TOPIC, Overview


class PipelineNews:
    """The newest overview of a pipeline."""

    def __init__(self, session: Session, on_news: Callable[[], None] = lambda: None) -> None:
        self._session = session
        self._on_news = on_news
        self._subscription: Subscription | None = None
        self.newest: Overview | None = None
        self.conductor = ""
        self.heard_at = 0.0
        """Hub time."""
        self.counts: Counter[str] = Counter()

    async def start(self) -> None:
        """Listen."""
        session = self._session
        self._subscription = await session.hub.subscribe(session.subjects.news("*", OVERVIEW_TOPIC), self._heard)

    async def close(self) -> None:
        """Listen no more. Idempotent."""
        if self._subscription is not None:
            await self._subscription.cancel()
            self._subscription = None

    def _heard(self, delivery: Delivery) -> None:
        peer = delivery.subject.split(".")[-2]
        presence = self._session.roster.get(peer)
        if presence is None or not presence.coordinates:
            self.counts["not_of_conductors"] += 1  # the hub lets every member publish news
            return
        try:
            self.newest = clean_all(decode(Overview, delivery.payload))
        except ProtocolError:
            self.counts["bad_overviews"] += 1
            return
        self.conductor, self.heard_at = peer, self._session.now()
        self._on_news()
