"""Follows all that a page shows of a run: the run as it is now, and what stands in the hub about its past."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Self, TypeVar

from potluck import tasks
from potluck.errors import ProtocolError, RetryableError
from potluck.hub.connection import Entry, Subscription
from potluck.messages import Message, decode
from potluck.monitor.fleetnews import FleetNews
from potluck.monitor.past import Past
from potluck.monitor.pipelinenews import PipelineNews
from potluck.monitor.watcher import Watcher
from potluck.paths.phasebook import PHASES_KEY, PhaseBook
from potluck.peer.session import Session
from potluck.plaintext import clean_all
from potluck.training.books import ballot, contributions
from potluck.training.books.ballot import Ballot
from potluck.training.books.contributions import ContributionBook
from potluck.training.books.history import FailureRecord, HistoryTail, Preview, RoundRecord, page_key, read_points
from potluck.training.manifest.manifest import Manifest, Settings

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0

M = TypeVar("M", bound=Message)


class RunFollower:
    """Everything a dashboard knows. Lives on the event loop of an open session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.watcher = Watcher(session)
        self.view = self.watcher.view
        self.past = Past()
        self.book = ContributionBook()
        self.ballot = Ballot()
        self.fleet = FleetNews(session)
        self.pipeline = PipelineNews(session)
        self.phases: PhaseBook | None = None
        """Who trains which path, where the run has paths."""
        self.counts: Counter[str] = Counter()
        self._subscriptions: list[Subscription] = []
        self._wanted: set[int] = set()  # pages of the history that are full and not here yet
        self._known_pages = 0
        self._page_wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, session: Session) -> Self:
        """Begin to follow."""
        self = cls(session)
        try:
            await self.watcher.start()
            await self._start_stores()
            await self.fleet.start()
            await self.pipeline.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Follow no more. Idempotent."""
        await tasks.end(self._task)
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            await subscription.cancel()
        await self.fleet.close()
        await self.pipeline.close()
        await self.watcher.close()

    @property
    def manifest(self) -> Manifest | None:
        """What the run trains, if anybody has said it."""
        return self.watcher.board.manifest

    @property
    def settings(self) -> Settings | None:
        """What counts for the next epoch."""
        return self.manifest.at(self.view.epoch) if self.manifest is not None else None

    async def _start_stores(self) -> None:
        hub = self.session.hub
        history = hub.store("history")
        for entry in await history.entries("page."):
            self._page_came(entry)
        self._task = asyncio.create_task(self._fetch_pages(), name="history pages")
        self._subscriptions = [
            await history.watch(self._tail_changed, "tail."),
            await history.watch(self._round_changed, "round."),
            await history.watch(self._failure_changed, "failed."),
            await history.watch(self._preview_changed, "preview."),
            await hub.store("contributions").watch(self._book_changed),
            await hub.store("ballot").watch(self._ballot_changed),
            await hub.store("shards").watch(self._phases_changed),
        ]

    def _phases_changed(self, entry: Entry) -> None:
        if entry.key != PHASES_KEY or entry.value is None:
            return
        try:
            self.phases = decode(PhaseBook, entry.value)
        except ProtocolError:
            self.counts["bad_books"] += 1

    def _page_came(self, entry: Entry) -> None:
        if entry.value is None:
            return
        try:
            number = int(entry.key.removeprefix("page."))
            self.past.put(number, read_points(entry.value))
        except (ProtocolError, ValueError):
            self.counts["bad_pages"] += 1
        else:
            self._wanted.discard(number)
            self._known_pages = max(self._known_pages, number + 1)

    def _tail_changed(self, entry: Entry) -> None:
        if entry.value is None:
            return
        try:
            tail = decode(HistoryTail, entry.value)
            self.past.put(tail.page, read_points(tail.points))
        except ProtocolError:
            self.counts["bad_pages"] += 1
            return
        if tail.page > self._known_pages:
            self._wanted |= set(range(self._known_pages, tail.page))
            self._known_pages = tail.page
            self._page_wanted.set()

    def _round_changed(self, entry: Entry) -> None:
        self._put(entry, RoundRecord, self.past.put_round, "bad_rounds")

    def _failure_changed(self, entry: Entry) -> None:
        self._put(entry, FailureRecord, self.past.put_failure, "bad_rounds")

    def _preview_changed(self, entry: Entry) -> None:
        self._put(entry, Preview, self.past.put_preview, "bad_previews")

    def _put(self, entry: Entry, kind: type[M], put: Callable[[M], None], bad: str) -> None:
        if entry.value is None:
            return
        try:
            put(clean_all(decode(kind, entry.value)))
        except ProtocolError:
            self.counts[bad] += 1

    def _book_changed(self, entry: Entry) -> None:
        if entry.key == contributions.KEY and entry.value is not None:
            try:
                self.book = clean_all(decode(ContributionBook, entry.value))
            except ProtocolError:
                self.counts["bad_books"] += 1

    def _ballot_changed(self, entry: Entry) -> None:
        if entry.key == ballot.KEY:
            self.ballot = ballot.read_ballot(entry.value)

    async def _fetch_pages(self) -> None:
        """A page that was filled while we followed: our copy of its end may be older than what was written."""
        history = self.session.hub.store("history")
        while True:
            await self._page_wanted.wait()
            self._page_wanted.clear()
            for number in sorted(self._wanted):
                try:
                    entry = await history.get(page_key(number))
                except RetryableError as error:
                    logger.debug("page %d of the history cannot be read just now: %s", number, error)
                    self._page_wanted.set()
                    await asyncio.sleep(RETRY_SECONDS)
                    break
                self._wanted.discard(number)
                if entry is not None:
                    self._page_came(entry)
