"""Writes the run's history while this peer holds the coordinator's lease. Lives on the event loop.

Only then does it listen to beacons. What the next coordinator finds in the hub it goes on with; what one did not live
to write down is missing, and the charts show a gap.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from dataclasses import dataclass

from potluck import tasks
from potluck.errors import ProtocolError, RetryableError
from potluck.hub.connection import Delivery, Subscription
from potluck.hub.presence import Beacon
from potluck.messages import decode, encode
from potluck.peer.groupsession import GroupSession
from potluck.peer.roster import RosterEvent
from potluck.round.averager import Averager
from potluck.round.outcome import FailedRound
from potluck.round.plan.messages import Commit
from potluck.training.books.history import (
    TAIL_KEY,
    HistoryLog,
    HistoryTail,
    failure_key,
    mean_loss,
    record_of,
    record_of_failure,
    round_key,
)

logger = logging.getLogger(__name__)

TICK_SECONDS = 1.0
IDLE_SECONDS = 10.0  # between points while nothing is committed
WRITE_EVERY_SECONDS = 2.0
SILENT_SECONDS = 10.0  # a beacon older than that says nothing any more
MAX_WAITING = 64  # commits whose rounds are to be written
MAX_PEERS = 4096
MAX_GONE = 256  # peers whose names are still known after their end
MAX_BEACON_BYTES = 1024


@dataclass(slots=True)
class _Told:
    """What one peer has said last."""

    loss: float | None
    rate: float
    at: float


class HistoryDesk:
    """Adds points and rounds to the history."""

    def __init__(self, session: GroupSession, averager: Averager) -> None:
        self.counts: Counter[str] = Counter()
        self._session = session
        self._lease = averager.lease
        self._store = session.hub.store("history")
        self._told: dict[str, _Told] = {}
        self._log: HistoryLog | None = None  # None: not read yet, or somebody else has written
        self._revision = 0
        self._is_written = True
        self._written_at = self._point_at = -math.inf
        self._rounds: deque[tuple[Commit, Commit | None]] = deque(maxlen=MAX_WAITING)
        self._failures: deque[tuple[FailedRound, float]] = deque(maxlen=MAX_WAITING)  # each with hub time
        self._last_commit: Commit | None = None
        self._new_commits: list[Commit] = []
        self._beacons: Subscription | None = None
        self._gone: dict[str, str] = {}  # names by peer: a death in a round is told of after that
        self._stop_listening = session.roster.listen(self._roster_changed)
        self._task = asyncio.create_task(self._run(), name="history")
        averager.listen(self._committed)
        averager.listen_to_failures(self._failed)

    async def close(self) -> None:
        """Write what there is, and nothing more. Idempotent."""
        self._stop_listening()
        if not self._task.done():
            await tasks.end(self._task)
            try:
                async with asyncio.timeout(WRITE_EVERY_SECONDS):
                    if self._lease.token and self._session.hub.is_connected:
                        await self._write_tail()
            except (RetryableError, TimeoutError) as error:
                logger.debug("the end of the history could not be written: %s", error)
        await self._listen(False)

    def _committed(self, commit: Commit) -> None:
        before, self._last_commit = self._last_commit, commit
        if self._lease.token:
            self._rounds.append((commit, before))
            self._new_commits.append(commit)

    def _failed(self, failed: FailedRound) -> None:
        self._failures.append((failed, self._session.now()))

    def _roster_changed(self, event: RosterEvent) -> None:
        if event.change in ("dead", "left"):
            self._gone.pop(event.peer, None)
            self._gone[event.peer] = event.presence.card.name
            if len(self._gone) > MAX_GONE:
                del self._gone[next(iter(self._gone))]

    async def _run(self) -> None:
        while True:
            try:
                await self._tick()
            except RetryableError as error:  # the hub is away, or another coordinator wrote first: look again
                self.counts["retries"] += 1
                self._log = None
                logger.debug("the history cannot be written just now: %s", error)
            except Exception:  # the history is no reason for a run to end: logged, counted, tried again
                self.counts["errors"] += 1
                self._log = None
                logger.exception("writing the history failed")
            await asyncio.sleep(TICK_SECONDS)

    async def _tick(self) -> None:
        is_ours = bool(self._lease.token)
        await self._listen(is_ours)
        if not is_ours:
            self._log = None
            self._rounds.clear()
            self._failures.clear()
            self._new_commits.clear()
            return
        if self._log is None:
            await self._read()
        now = self._session.clock.monotonic()
        if self._new_commits or now - self._point_at >= IDLE_SECONDS:
            self._add_point(now)
        while self._rounds:
            await self._write_round(*self._rounds[0])
            self._rounds.popleft()
        while self._failures:
            await self._write_failure(*self._failures[0])
            self._failures.popleft()
        if not self._is_written and now - self._written_at >= WRITE_EVERY_SECONDS:
            self._written_at = now
            await self._write_tail()

    async def _listen(self, wanted: bool) -> None:
        if wanted and self._beacons is None:
            subject = self._session.subjects.beacon("*")
            self._beacons = await self._session.hub.subscribe(subject, self._beacon_came)
        elif not wanted and self._beacons is not None:
            beacons, self._beacons = self._beacons, None
            self._told.clear()
            await beacons.cancel()

    def _beacon_came(self, delivery: Delivery) -> None:
        peer = delivery.subject.rsplit(".", 1)[-1]
        presence = self._session.roster.get(peer)
        if presence is None or presence.card.role != "trainer":
            return
        if peer not in self._told and len(self._told) >= MAX_PEERS:
            return
        try:
            beacon = decode(Beacon, delivery.payload, limit_bytes=MAX_BEACON_BYTES)
        except ProtocolError:
            self.counts["bad_beacons"] += 1
            return
        rate = beacon.samples_per_second if 0.0 <= beacon.samples_per_second <= 1e12 else 0.0
        self._told[peer] = _Told(beacon.loss, rate, self._session.clock.monotonic())

    def _add_point(self, now: float) -> None:
        assert self._log is not None
        commits, self._new_commits = self._new_commits, []
        self._told = {peer: told for peer, told in self._told.items() if now - told.at <= SILENT_SECONDS}
        loss = mean_loss((told.loss, told.rate) for told in self._told.values())
        newest = self._last_commit
        self._log.append(
            at=self._session.now(),
            epoch=newest.epoch if newest is not None else 0,
            loss=loss if loss is not None else math.nan,
            rate=sum(told.rate for told in self._told.values()),
            alone=max((told.rate for told in self._told.values()), default=0.0),
            trainers=len(self._told),
            peers=len(self._session.roster),
            sent_bytes=sum(member.sent_bytes for commit in commits for member in commit.members),
            round_seconds=commits[-1].seconds if commits else math.nan,
        )
        self._point_at = now
        self._is_written = False

    async def _read(self) -> None:
        entry = await self._store.get(TAIL_KEY)
        self._log, self._revision = HistoryLog(), 0
        if entry is None or entry.value is None:
            return
        self._revision = entry.revision
        try:
            self._log = HistoryLog.of(decode(HistoryTail, entry.value))
        except ProtocolError as error:
            self.counts["bad_tails"] += 1
            logger.warning("the end of the history cannot be read, its last points are lost: %s", error)

    async def _write_tail(self) -> None:
        if self._log is None or self._is_written:
            return
        page = self._log.complete_page()
        if page is not None:
            key, value = page
            await self._store.put(key, value)
            self._log.turn_page()
        self._revision = await self._store.put(TAIL_KEY, encode(self._log.tail()), expected=self._revision)
        self._is_written = True
        self.counts["written"] += 1

    async def _write_round(self, commit: Commit, before: Commit | None) -> None:
        await self._store.put(round_key(commit.epoch), encode(record_of(commit, self._names(), before)))
        self.counts["rounds"] += 1

    async def _write_failure(self, failed: FailedRound, at: float) -> None:
        record = record_of_failure(failed, self._names(), at)
        await self._store.put(failure_key(failed.key.epoch, failed.key.attempt), encode(record))
        self.counts["failures"] += 1

    def _names(self) -> dict[str, str]:
        return self._gone | {presence.peer: presence.card.name for presence in self._session.roster}
