"""Follows a run over the hub: a member of any role can watch."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Self

from potluck.errors import ConfigurationError, ProtocolError, RetryableError
from potluck.hub.connection import Delivery, Entry, Subscription
from potluck.hub.leaserecord import LeaseRecord
from potluck.hub.presence import Beacon, Presence
from potluck.messages import decode
from potluck.monitor.alarms import Alarm, Alarms
from potluck.monitor.view import RunView
from potluck.peer.groupsession import STORE as GROUPS
from potluck.peer.lease import LeaseView
from potluck.peer.roster import RosterEvent
from potluck.peer.session import Session
from potluck.round.lineage import Head, Lineage
from potluck.round.plan.messages import Commit
from potluck.round.plan.signing import read_commit
from potluck.run.cutboard import CutBoard
from potluck.run.hostnews import MAX_NEWS_BYTES as MAX_HOST_NEWS_BYTES
from potluck.run.hostnews import TOPIC as HOST_NEWS
from potluck.run.hostnews import HostNews
from potluck.run.linknews import MAX_NEWS_BYTES, LinkNews
from potluck.run.linknews import TOPIC as LINK_NEWS
from potluck.state.announcement import KEPT, Kept
from potluck.training.books.history import EVALUATION_LOSS, Preview
from potluck.training.manifest.manifest import Change
from potluck.training.manifest.noticeboard import NoticeBoard

logger = logging.getLogger(__name__)

MAX_BEACON_BYTES = 1024
RETRY_SECONDS = 1.0


class Watcher:
    """Keeps a view of a run. Lives on the event loop of an open session."""

    def __init__(self, session: Session) -> None:
        self.view = RunView(session.subjects.run)
        self._alarms = Alarms()
        self.board = NoticeBoard.of(session)
        self.counts: Counter[str] = Counter()
        self._session = session
        self._lease = LeaseView()
        self._lineage = Lineage(session.hub.store("lineage"), session.subjects.run, self._committed)
        self._cuts = CutBoard(session.hub.store(GROUPS))
        self._subscriptions: list[Subscription] = []
        self._stop_listening: Callable[[], None] = lambda: None

    @classmethod
    async def started(cls, session: Session) -> Self:
        """One that follows; while the hub is away, it is waited for."""
        while True:
            watcher = cls(session)
            try:
                await watcher.start()
            except RetryableError as error:
                await watcher.close()
                logger.info("the run cannot be watched yet, trying on: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return watcher

    async def start(self) -> None:
        """Begin to follow."""
        session = self._session
        self._stop_listening = session.roster.listen(self._roster_changed)
        for presence in session.roster:
            self._peer_changed(presence)
        # One by one: if the next one fails, `close` cancels those that there are.
        follow, hub, subjects = self._subscriptions.append, session.hub, session.subjects
        follow(await hub.store("lease").watch(self._lease_changed))
        follow(await hub.store("history").watch(self._preview_changed, "preview."))
        follow(await hub.subscribe(subjects.beacon("*"), self._beacon_came))
        follow(await hub.subscribe(subjects.news("*", LINK_NEWS), self._links_told))
        follow(await hub.subscribe(subjects.news("*", KEPT), self._kept_came))
        follow(await hub.subscribe(subjects.news("*", HOST_NEWS), self._host_told))
        follow(await hub.store(GROUPS).watch(self._group_changed, "g."))
        self._cuts.listen(self._cut_changed)
        await self._cuts.start()
        follow(await self._cuts.watch_parts(self._alarms.cuts.part_told))
        await self._lineage.start()
        await self.board.start()

    async def close(self) -> None:
        """Follow no more. Idempotent."""
        self._stop_listening()
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            await subscription.cancel()
        await self._cuts.close()
        await self._lineage.close()
        await self.board.close()

    @property
    def is_paused(self) -> bool:
        """Whether an organiser has the trainers wait."""
        manifest = self.board.manifest
        return manifest is not None and manifest.at(self.view.epoch).paused

    @property
    def is_over(self) -> bool:
        """Whether the run has come to its end."""
        manifest = self.board.manifest
        return manifest is not None and manifest.is_over(self.view.epoch)

    @property
    def pause(self) -> Change | None:
        """The order by which the run is paused, if it is, and the order is among the last."""
        manifest = self.board.manifest
        return manifest.newest_change("paused") if manifest is not None and self.is_paused else None

    def alarms(self) -> list[Alarm]:
        """What is wrong with the run now. Ask every few seconds: how long something lasts counts."""
        now = self._session.clock.monotonic()
        return self._alarms.look(now, is_paused=self.is_paused or self.is_over, coordinator=self.view.coordinator)

    def _roster_changed(self, event: RosterEvent) -> None:
        self._peer_changed(event.presence)

    def _peer_changed(self, presence: Presence) -> None:
        self.view.peer_changed(presence)
        self._alarms.peer_changed(presence, self._session.clock.monotonic())

    def _committed(self, commit: Commit) -> None:
        self.view.committed(commit)
        self._alarms.committed(commit, self._session.clock.monotonic())

    def _lease_changed(self, entry: Entry) -> None:
        self._lease.apply(entry)
        self.view.coordinator = self._lease.holder or ""

    def _group_changed(self, entry: Entry) -> None:
        """A group's lease or head; entries are `g.GROUP.lease.coordinator` and `g.GROUP.lineage.head`."""
        _, group, store, _ = (*entry.key.split(".", 3), "", "", "")[:4]
        try:
            if store == "lease":
                holder = decode(LeaseRecord, entry.value).holder if entry.value is not None else ""
                self.view.group_held(group, holder)
            elif store == "lineage" and entry.value is not None:
                head = decode(Head, entry.value)
                if head.commit is not None:
                    commit = read_commit(head.commit, self._session.subjects.of_group(group).scope)
                    self.view.group_committed(group, commit)
                    self._alarms.cuts.group_committed(group, commit.epoch)
        except (ProtocolError, ConfigurationError):
            self.counts["bad_groups"] += 1

    def _cut_changed(self) -> None:
        self.view.cut = self._cuts.latest()
        self._alarms.cuts.cuts_changed(self._cuts.last_number, self.view.cut, self._session.clock.monotonic())

    def _preview_changed(self, entry: Entry) -> None:
        if entry.value is None:
            return
        try:
            preview = decode(Preview, entry.value)
        except ProtocolError:
            self.counts["bad_previews"] += 1
            return
        if EVALUATION_LOSS in preview.figures:
            self._alarms.evaluated(preview.epoch, preview.figures[EVALUATION_LOSS])
            self.view.evaluated(preview.epoch, preview.figures[EVALUATION_LOSS])

    def _beacon_came(self, delivery: Delivery) -> None:
        peer = delivery.subject.rsplit(".", 1)[-1]
        try:
            beacon = decode(Beacon, delivery.payload, limit_bytes=MAX_BEACON_BYTES)
        except ProtocolError:
            self.counts["bad_beacons"] += 1
            return
        now = self._session.clock.monotonic()
        self.view.beacon_came(peer, beacon, now)
        self._alarms.beacon_came(peer, beacon, now)

    def _kept_came(self, delivery: Delivery) -> None:
        try:
            kept = decode(Kept, delivery.payload)
        except ProtocolError:
            self.counts["bad_announcements"] += 1
            return
        self._alarms.kept(delivery.subject.rsplit(".", 2)[-2], kept, self._session.clock.monotonic())

    def _links_told(self, delivery: Delivery) -> None:
        try:
            news = decode(LinkNews, delivery.payload, limit_bytes=MAX_NEWS_BYTES)
        except ProtocolError:
            self.counts["bad_link_news"] += 1
            return
        self.view.links_told(delivery.subject.rsplit(".", 2)[-2], news)

    def _host_told(self, delivery: Delivery) -> None:
        try:
            news = decode(HostNews, delivery.payload, limit_bytes=MAX_HOST_NEWS_BYTES)
        except ProtocolError:
            self.counts["bad_host_news"] += 1
            return
        peer = delivery.subject.rsplit(".", 2)[-2]
        self._alarms.host_told(peer, news, self._session.clock.monotonic())
