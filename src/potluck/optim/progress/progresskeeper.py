"""Tells the run how far this peer is, and this peer how far the run is; lives on the event loop.

    step ─▶ report ─▶ beacon ───▶ coordinator: tracker ───▶ news.COORDINATOR.progress ───▶ everybody: `latest`

The holder of the lease keeps the books: it hears beacons only while it holds it. A beacon goes out each second anyway;
when the target is near, or seems reached, one goes out with the step itself, so that the start of a round is not late
by a second.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable

from potluck import tasks
from potluck.errors import PotluckError, ProtocolError, RetryableError
from potluck.hub.connection import Delivery, Subscription
from potluck.hub.presence import Beacon
from potluck.messages import decode, encode
from potluck.optim.progress.tracker import ProgressTracker, RunProgress
from potluck.peer.groupsession import GroupSession
from potluck.peer.lease import Lease
from potluck.peer.roster import RosterEvent

logger = logging.getLogger(__name__)

TOPIC = "progress"
TICK_SECONDS = 0.25
TELL_EVERY_SECONDS = 1.0  # where nothing has happened
TELL_AGAIN_SECONDS = 0.1  # where the epoch's end is expected at another time than was told
LEAST_CORRECTION_SECONDS = 0.05  # by more than this,
CORRECTION = 0.1  # and by more than such a part of what is left
EAGER_EVERY_SECONDS = 0.02
NEAR_SECONDS = 1.0  # from the target: beacons go out with each step
FAR_SECONDS = 0.02  # of the shortest way: what is near is sooner told than anybody could stand by for it
LONGEST_WAY_SECONDS = 2.0  # of a word; where it seems longer, clocks are wrong
MAX_BEACON_BYTES = 1024
MAX_PROGRESS_BYTES = 1024


class ProgressKeeper:
    """One peer's view of the run's progress."""

    def __init__(self, session: GroupSession, lease: Lease, epoch: Callable[[], int], target: int | None) -> None:
        self.latest: RunProgress | None = None
        """The coordinator's newest message. Immutable, so any thread may read it."""
        self.way_seconds = 0.0
        """How long it was on its way. Any thread may read it."""
        self.counts: Counter[str] = Counter()
        self._least_way_seconds = math.inf  # of this coordinator's words
        self._session = session
        self._lease = lease
        self._epoch = epoch
        self._tracker = ProgressTracker(target)
        self._beacons: Subscription | None = None
        self._news: Subscription | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._eager = asyncio.Event()
        self._changed = asyncio.Event()
        self._wake = asyncio.Event()
        self._told_at = 0.0
        self._told_due_at: float | None = None
        self._told_samples = 0
        self._told_epoch = 0
        self._heard_at = 0.0  # the newest message
        self._stop_listening: Callable[[], None] = lambda: None

    async def start(self) -> None:
        """Listen, and keep the books when it is our turn."""
        session = self._session
        self._news = await session.hub.subscribe(session.subjects.news("*", TOPIC), self._news_came)
        self._stop_listening = session.roster.listen(self._roster_changed)
        self._tasks = [
            asyncio.create_task(self._run(), name="progress"),
            asyncio.create_task(self._send_eager_beacons(), name="progress: beacons"),
        ]

    async def close(self) -> None:
        """Idempotent."""
        self._stop_listening()
        await tasks.end(*self._tasks)
        for subscription in (self._news, self._beacons):
            if subscription is not None:
                await subscription.cancel()
        self._news = self._beacons = None

    @property
    def target(self) -> int | None:
        """How many samples make an epoch; None: what most trainers say."""
        return self._tracker.target

    @target.setter
    def target(self, samples: int) -> None:
        """May be set by any thread: the next reader counts with it."""
        self._tracker.target = samples

    @property
    def num_trainers(self) -> int:
        """How many train, as the coordinator says."""
        return self.latest.num_trainers if self.latest is not None else 0

    @property
    def weight_cap(self) -> float | None:
        """How many times what others have may count of what a peer says; None: all of it."""
        return self._tracker.weight_cap

    @weight_cap.setter
    def weight_cap(self, cap: float | None) -> None:
        self._tracker.weight_cap = cap

    # What this peer says

    def report(
        self,
        *,
        epoch: int,
        samples: int,
        samples_per_second: float,
        steps_per_second: float = 0.0,
        eager: bool = False,
        leaving: bool = False,
    ) -> None:
        """This peer has so many samples for the epoch after `epoch`; `eager`: say so at once; `leaving`: no more.

        That it is at another epoch than before it says at once too: the coordinator predicts by it.
        """
        rates = {"samples_per_second": samples_per_second, "steps_per_second": steps_per_second}
        told = {"epoch": epoch, "samples": samples, **rates, "leaving": leaving}
        self._session.update_beacon(**told, target=self._tracker.target or 0, counted_at=self._session.now())
        self._told_samples = samples
        if self._lease.token:
            beacon = Beacon(session="", **told, target=self._tracker.target or 0)  # type: ignore[arg-type]
            now, is_trusted = self._session.clock.monotonic(), self._is_trusted(self._session.peer_id)
            self._tracker.heard(self._session.peer_id, beacon, now, is_trusted=is_trusted)
            self._wake.set()
        elif eager or epoch != self._told_epoch or self._is_near():
            self._eager.set()
        self._told_epoch = epoch

    def seems_due(self, epoch: int, samples: int) -> bool:
        """Whether, with this peer's samples, the run should have enough for the epoch after `epoch`."""
        latest = self.latest
        if latest is None or latest.epoch != epoch:
            return self._tracker.target is not None and samples >= self._tracker.target
        others = max(0, latest.samples - self._told_samples)
        return latest.is_due or 0 < latest.target <= others + samples

    def due_in_seconds(self, epoch: int) -> float | None:
        """When the epoch after `epoch` should be due, from now on; None: nobody can tell. Any thread may ask."""
        latest, heard_at = self.latest, self._heard_at
        if latest is None or latest.epoch != epoch or latest.due_in_seconds is None:
            return None
        return max(0.0, latest.due_in_seconds - self.way_seconds - (self._session.clock.monotonic() - heard_at))

    @property
    def is_far(self) -> bool:
        """Whether all words of the coordinator take long to come: one alone may have met a busy machine. Any thread."""
        return FAR_SECONDS <= self._least_way_seconds < math.inf

    async def until_due(self, epoch: int, seconds: float | None) -> bool:
        """Wait until the coordinator says that the epoch after `epoch` is due, or has come; False: not in time."""
        return await self._until(lambda: self.is_due(epoch), seconds)

    async def until_committed(self, epoch: int, seconds: float) -> bool:
        """Wait until an epoch after `epoch` is committed; False: not in time."""
        return await self._until(lambda: self._epoch() > epoch, seconds)

    async def _until(self, condition: Callable[[], bool], seconds: float | None) -> bool:
        try:
            async with asyncio.timeout(seconds):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def is_due(self, epoch: int) -> bool:
        """Whether the epoch after `epoch` is due, or was committed already."""
        latest = self.latest
        if self._epoch() > epoch:
            return True
        return latest is not None and latest.epoch == epoch and latest.is_due

    def committed(self) -> None:
        """The lineage has moved. A trainer says that it has too when it has the state."""
        if self._session.card.role != "trainer":
            self._session.update_beacon(epoch=self._epoch())
        self._told_samples = 0
        self._wake.set()
        self._changed.set()

    def _is_near(self) -> bool:
        due_in_seconds = self.due_in_seconds(self._epoch())
        return due_in_seconds is not None and due_in_seconds <= NEAR_SECONDS

    async def _send_eager_beacons(self) -> None:
        while True:
            await self._eager.wait()
            self._eager.clear()
            try:
                await self._session.publish_beacon()
            except PotluckError as error:  # the next second's beacon says it again
                logger.debug("no beacon just now: %s", error)
            await asyncio.sleep(EAGER_EVERY_SECONDS)

    # What others say

    def _news_came(self, delivery: Delivery) -> None:
        sender = delivery.subject.rsplit(".", 2)[-2]
        try:
            progress = decode(RunProgress, delivery.payload, limit_bytes=MAX_PROGRESS_BYTES)
        except ProtocolError as error:
            self.counts["bad_news"] += 1
            logger.debug("progress from %s cannot be read: %s", sender, error)
            return
        if sender == self._session.peer_id or not self._lease.view.accepts(sender, progress.token):
            self.counts["foreign_news"] += 1
            return
        self._take(progress)

    def _take(self, progress: RunProgress) -> None:
        self._heard_at = self._session.clock.monotonic()
        way_seconds = self._session.now() - progress.told_at if progress.told_at else 0.0
        self.way_seconds = min(max(way_seconds, 0.0), LONGEST_WAY_SECONDS)
        is_same = self.latest is not None and self.latest.token == progress.token
        self._least_way_seconds = min(self.way_seconds, self._least_way_seconds if is_same else math.inf)
        self.latest = progress
        self._changed.set()

    def _beacon_came(self, delivery: Delivery) -> None:
        peer = delivery.subject.rsplit(".", 1)[-1]
        if peer == self._session.peer_id or peer not in self._session.roster:
            return
        try:
            beacon = decode(Beacon, delivery.payload, limit_bytes=MAX_BEACON_BYTES)
        except ProtocolError:
            self.counts["bad_beacons"] += 1
            return
        before = self.latest
        age_seconds = self._session.now() - beacon.counted_at if beacon.counted_at else 0.0
        now, is_trusted = self._session.clock.monotonic(), self._is_trusted(peer)
        self._tracker.heard(peer, beacon, now, age_seconds=age_seconds, is_trusted=is_trusted)
        if before is None or not before.is_due:
            self._wake.set()

    def _is_trusted(self, peer: str) -> bool:
        presence = self._session.roster.get(peer)
        return presence is not None and presence.trusted

    def _roster_changed(self, event: RosterEvent) -> None:
        if event.change in ("dead", "left"):
            self._tracker.forget(event.peer)
            self._wake.set()

    # The coordinator's part

    async def _run(self) -> None:
        while True:
            try:
                await self._keep_books()
            except RetryableError as error:
                self.counts["unsaid"] += 1
                logger.debug("progress could not be told: %s", error)
            except Exception:  # a run without progress would stand still: logged, counted, tried again
                self.counts["errors"] += 1
                logger.exception("keeping the run's progress failed")
                await asyncio.sleep(TICK_SECONDS)
            await self._pause()

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(TICK_SECONDS):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    def _is_corrected(self, progress: RunProgress, now: float) -> bool:
        """Whether the end of the epoch is expected at another time than was told, by more than is left to chance."""
        if progress.due_in_seconds is None or self._told_due_at is None:
            return (progress.due_in_seconds is None) != (self._told_due_at is None)
        error = abs(now + progress.due_in_seconds - self._told_due_at)
        return error > max(LEAST_CORRECTION_SECONDS, CORRECTION * progress.due_in_seconds)

    async def _keep_books(self) -> None:
        token = self._lease.token
        if not token:
            if self._beacons is not None:
                beacons, self._beacons = self._beacons, None
                await beacons.cancel()
            return
        session = self._session
        if self._beacons is None:
            self._beacons = await session.hub.subscribe(session.subjects.beacon("*"), self._beacon_came)
        now = session.clock.monotonic()
        self._tracker.committed(self._epoch(), now)
        before, progress = self.latest, self._tracker.summary(now, token=token, told_at=session.now())
        is_news = (
            before is None
            or (before.epoch, before.token, before.is_due) != (progress.epoch, token, progress.is_due)
            or now - self._told_at >= TELL_EVERY_SECONDS
            or (now - self._told_at >= TELL_AGAIN_SECONDS and self._is_corrected(progress, now))
        )
        self._take(progress)
        if is_news:
            self._told_at = now
            self._told_due_at = now + progress.due_in_seconds if progress.due_in_seconds is not None else None
            await session.hub.publish(session.subjects.news(session.peer_id, TOPIC), encode(progress))
