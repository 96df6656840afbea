"""Follows a run over the hub: a member of any role can watch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from potluck.errors import ProtocolError
from potluck.hub.connection import Delivery, Entry, Subscription
from potluck.hub.presence import Beacon
from potluck.messages import decode
from potluck.monitor.view import RunView
from potluck.peer.lease import LeaseView
from potluck.peer.roster import RosterEvent
from potluck.peer.session import Session
from potluck.round.lineage import Lineage
from potluck.run.linknews import MAX_NEWS_BYTES, LinkNews
from potluck.run.linknews import TOPIC as LINK_NEWS

MAX_BEACON_BYTES = 1024


class Watcher:
    """Keeps a view of a run. Lives on the event loop of an open session."""

    def __init__(self, session: Session) -> None:
        self.view = RunView(session.subjects.run)
        self.counts: Counter[str] = Counter()
        self._session = session
        self._lease = LeaseView()
        self._lineage = Lineage(session.hub.store("lineage"), session.subjects.run, self.view.committed)
        self._subscriptions: list[Subscription] = []
        self._stop_listening: Callable[[], None] = lambda: None

    async def start(self) -> None:
        """Begin to follow."""
        session = self._session
        self._stop_listening = session.roster.listen(self._roster_changed)
        for presence in session.roster:
            self.view.peer_changed(presence)
        self._subscriptions = [
            await session.hub.store("lease").watch(self._lease_changed),
            await session.hub.subscribe(session.subjects.beacon("*"), self._beacon_came),
            await session.hub.subscribe(session.subjects.news("*", LINK_NEWS), self._links_told),
        ]
        await self._lineage.start()

    async def close(self) -> None:
        """Follow no more. Calling it twice does no harm."""
        self._stop_listening()
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            await subscription.cancel()
        await self._lineage.close()

    def _roster_changed(self, event: RosterEvent) -> None:
        self.view.peer_changed(event.presence)

    def _lease_changed(self, entry: Entry) -> None:
        self._lease.apply(entry)
        self.view.coordinator = self._lease.holder or ""

    def _beacon_came(self, delivery: Delivery) -> None:
        peer = delivery.subject.rsplit(".", 1)[-1]
        try:
            beacon = decode(Beacon, delivery.payload, limit_bytes=MAX_BEACON_BYTES)
        except ProtocolError:
            self.counts["bad_beacons"] += 1
            return
        self.view.beacon_came(peer, beacon, self._session.clock.monotonic())

    def _links_told(self, delivery: Delivery) -> None:
        try:
            news = decode(LinkNews, delivery.payload, limit_bytes=MAX_NEWS_BYTES)
        except ProtocolError:
            self.counts["bad_link_news"] += 1
            return
        self.view.links_told(delivery.subject.rsplit(".", 2)[-2], news)
