"""Keeping without training: an aux peer takes over the trainers' state now and then, and sees that the run goes on.

It has no model, so it fetches as a newcomer would: every so many epochs, with pauses; in between, for a twentieth of
the time, so that where epochs are long newcomers get the newest state from it, and no trainer has to
give it to each of them; and what only those have who are about to leave (handingover.py). What it has it serves and
saves, so that a run survives though all trainers are gone. And where the trainers have all come back
from disk, and nobody has the state of the present epoch, it chooses with them what to go on from, as the coordinator
that it often is.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from potluck import tasks
from potluck.clock import Clock
from potluck.errors import RetryableError
from potluck.peer.roster import Roster
from potluck.state.fetched import FetchedState
from potluck.state.keeper import StateKeeper
from potluck.state.resuming import EpochSource

logger = logging.getLogger(__name__)

LOOK_EVERY_SECONDS = 1.0
DOWN_SECONDS = 3.0  # without a state of the present epoch: each epoch is without one for a moment
LOAD_SECONDS = 600.0  # without anything coming, unless a run says otherwise
PAUSE_FACTOR = 9  # a fetch that took a second is followed by nine without
# … but by no more than this: on a slow line the fetch took long, and took little from the rounds (link/line.py). The
# next one may come over a faster line, and the death of all trainers should cost no more than the interval of backups.
LONGEST_PAUSE_SECONDS = 30.0
FRESH_PAUSE_FACTOR = 19  # … and by nineteen, where no state is due and one that is newer would only be nice to have
FAILED_PAUSE_SECONDS = 2.0
EPOCHS_WITHOUT_BACKUPS = 10  # between two fetches, where nothing is saved


class Follower:
    """Keeps a keeper filled. Lives on the event loop."""

    def __init__(
        self,
        keeper: StateKeeper,
        averager: EpochSource,
        roster: Roster,
        clock: Clock,
        *,
        num_training: Callable[[], int],
    ) -> None:
        """`num_training` tells how many trainers are at the present epoch, as far as the coordinator knows."""
        self.counts: Counter[str] = Counter()
        self.load_seconds = LOAD_SECONDS
        """A fetch in which nothing comes for so long has failed."""
        self._keeper = keeper
        self._averager = averager
        self._roster = roster
        self._clock = clock
        self._num_training = num_training
        self._epoch: int | None = None  # of the state that was taken last
        self._next_at = 0.0
        self._due_epoch: int | None = None  # of the one that was taken last because it was due, and is saved
        self._fresh_at = 0.0
        self._num_late = 0  # how many epochs after it was due the last fetch had ended
        self._seen_epoch = 0
        self._up_at = clock.monotonic()  # when somebody had the state of the present epoch, or trained, last
        self._task: asyncio.Task[None] | None = None
        self._fetching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Follow from now on."""
        self._task = asyncio.create_task(self._follow(), name="state: following")

    async def close(self) -> None:
        """Follow no more. Idempotent."""
        await tasks.end(self._task, self._fetching)

    async def _follow(self) -> None:
        while True:
            if self._is_run_down():
                await tasks.end(self._fetching)  # nobody will give it any more
                await self._take(self._keeper.resume(timeout_seconds=self.load_seconds))
            elif (epoch := self._wanted()) is not None and (self._fetching is None or self._fetching.done()):
                self._fetching = asyncio.create_task(self._fetch(epoch), name="state: following, fetch")
            await asyncio.sleep(LOOK_EVERY_SECONDS)

    async def _fetch(self, at_least_epoch: int) -> None:
        is_due = at_least_epoch >= self._next_epoch
        busy_seconds = await self._take(self._compare_and_fetch(at_least_epoch), is_due=is_due)
        if is_due:
            self._num_late = max(self._averager.lineage.epoch - at_least_epoch, 0)
        # Only what took others' time is made up for: a fetch that failed, or waited, has taken none.
        busy_pause = min(PAUSE_FACTOR * (busy_seconds or 0.0), LONGEST_PAUSE_SECONDS)
        pause = FAILED_PAUSE_SECONDS if busy_seconds is None else busy_pause
        self._next_at = self._clock.monotonic() + pause
        self._fresh_at = self._clock.monotonic() + max(pause, FRESH_PAUSE_FACTOR * (busy_seconds or 0.0))

    async def _compare_and_fetch(self, at_least_epoch: int) -> FetchedState:
        await self._keeper.look_for_damage()
        return await self._keeper.fetch(at_least_epoch=at_least_epoch, timeout_seconds=self.load_seconds)

    async def _take(self, coming: Coroutine[Any, Any, FetchedState | None], *, is_due: bool = True) -> float | None:
        """For how long it was given a state; None: it got none. One that is due is saved at once."""
        try:
            fetched = await coming
        except RetryableError as error:
            self.counts["failed"] += 1
            logger.warning("the run's state could not be fetched, and is not saved here: %s", error)
        except Exception:  # without it the run goes on, with one keeper less; logged, counted, tried again
            self.counts["errors"] += 1
            logger.exception("following the run's state failed")
        else:
            if fetched is not None:
                with fetched:
                    self._epoch = fetched.epoch
                    self._due_epoch = fetched.epoch if is_due else self._due_epoch
                    self._keeper.save(fetched.epoch, fetched.snapshot, made_at=fetched.made_at, at_once=is_due)
                    self.counts["followed"] += 1
                    return fetched.report.busy_seconds
        return None

    def _is_run_down(self) -> bool:
        """Whether trainers are there, and for a while none of them has had the state of the present epoch."""
        epoch, now = self._averager.lineage.epoch, self._clock.monotonic()
        has_trainers = any(presence.card.role == "trainer" for presence in self._roster)
        has_moved, self._seen_epoch = epoch != self._seen_epoch, epoch  # faster than states are announced
        is_up = has_moved or self._keeper.is_in_the_making
        is_up = is_up or self._num_training() > 0 or self._keeper.directory.verdict(epoch) is not None
        if is_up or not (epoch and has_trainers):
            self._up_at = now
        return now - self._up_at >= DOWN_SECONDS

    @property
    def _next_epoch(self) -> int:
        """The first epoch whose state is wanted."""
        backups = self._keeper.backups
        every = backups.config.every_epochs if backups is not None else EPOCHS_WITHOUT_BACKUPS
        # As many epochs earlier as the last one came late: what all trainers' death would cost is one interval.
        return 1 if self._due_epoch is None else self._due_epoch + max(every - self._num_late, 1)

    def _wanted(self) -> int | None:
        """From which epoch on a state should be fetched now; None: none is due."""
        if not self._keeper.keeps:
            return None
        directory, least = self._keeper.directory, 1 if self._epoch is None else self._epoch + 1
        # Whether it can be believed is found out by fetching it: that compares values where digests decide nothing.
        offered = directory.offered(self._averager.lineage.epoch, at_least=least)
        if offered is None:
            return None
        epoch, keepers = offered
        if keepers and all(directory.announcements.is_leaving(peer) for peer in keepers):
            return epoch
        if self._epoch is not None and self._clock.monotonic() >= self._fresh_at:
            return epoch
        is_due = epoch >= self._next_epoch and self._clock.monotonic() >= self._next_at
        return self._next_epoch if is_due else None
