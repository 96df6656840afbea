"""The book of phases in the hub: the coordinator of the run gives out leases, trainers ask for them.

As with shards, the book is one record, written by compare-and-set: two coordinators cannot give out one phase twice,
and a new one goes on where the last stopped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Self, TypeVar

import msgspec

from potluck.errors import ConfigurationError, PotluckError, RetryableError, RevisionConflictError, StoppedError
from potluck.hub.connection import HubConnection
from potluck.link.dispatch import Incoming
from potluck.messages import Message, decode, encode
from potluck.paths.grid import MAX_LEVELS, MAX_PATHS, Grid
from potluck.paths.phasebook import (
    PHASES_KEY,
    Count,
    Lease,
    Name,
    PhaseBook,
    Report,
    check_same_paths,
    finish,
    is_all_done,
    new_book,
    open_modules,
    take,
)
from potluck.peer.lease import Lease as CoordinatorLease
from potluck.peer.lease import LeaseView
from potluck.run.group import Group
from potluck.run.joined import Joined

logger = logging.getLogger(__name__)

STORE = "shards"
ASK_SECONDS = 5.0
ATTEMPTS = 3
RETRY_SECONDS = 0.2

M = TypeVar("M", bound=Message)

Levels = Annotated[tuple[Annotated[int, msgspec.Meta(ge=1, le=MAX_PATHS)], ...], msgspec.Meta(max_length=MAX_LEVELS)]


class TakePhase(Message, frozen=True, kw_only=True, tag="paths.take"):
    """Which phase is next for me?"""

    levels: Levels


class PhaseTaken(Message, frozen=True, kw_only=True, tag="paths.taken"):
    """This one is yours until you finish it, ask again, or leave."""

    lease: Lease | None = None  # None: nothing is free
    is_over: bool = False  # nothing is left to train, for anybody
    needs: dict[Name, int] = {}
    last: Name = ""  # who trained the path last
    holders: Count = 1  # who are at work on it, the one that asked included
    open: tuple[Name, ...] = ()


class FinishPhase(Message, frozen=True, kw_only=True, tag="paths.finish"):
    """I have trained my phase."""

    levels: Levels
    report: Report


class PhaseFinished(Message, frozen=True, kw_only=True, tag="paths.finished"):
    """For which share of a phase it counts; 0: another has the lease, and it does not."""

    share: float


class PhaseDesk:
    """Gives out phases while this peer holds the coordinator's lease. Lives on the event loop."""

    def __init__(self, group: Group, lease: CoordinatorLease, grid: Grid, end: Callable[[], int] = lambda: 0) -> None:
        """`end`: after how many phases a path is done; 0: it goes on."""
        self.counts: Counter[str] = Counter()
        self._session = group.session
        self._store = group.session.hub.store(STORE)
        self._lease = lease
        self._grid = grid
        self._end = end
        self._turn = asyncio.Lock()
        group.links.handle(TakePhase, self._asked)
        group.links.handle(FinishPhase, self._told)

    async def _asked(self, incoming: Incoming[TakePhase]) -> PhaseTaken:
        given: list[PhaseTaken] = []

        def give(book: PhaseBook, present: set[str]) -> PhaseBook:
            check_same_paths(book, incoming.message.levels)
            book, lease = take(book, incoming.sender, present=present, now=self._session.now(), end=self._end())
            entry = book.entries[lease.path] if lease is not None else None
            given[:] = [
                PhaseTaken(
                    lease=lease,
                    is_over=is_all_done(book, self._end()),
                    needs=entry.needs if entry is not None else {},
                    last=entry.last if entry is not None else "",
                    holders=len(book.holders(lease.path)) if lease is not None else 0,
                    open=open_modules(book, self._grid),
                )
            ]
            return book

        await self._write(give)
        self.counts["given"] += 1
        return given[0]

    async def _told(self, incoming: Incoming[FinishPhase]) -> PhaseFinished:
        shares: list[float] = []

        def end(book: PhaseBook, present: set[str]) -> PhaseBook:
            check_same_paths(book, incoming.message.levels)
            book, share = finish(book, incoming.sender, incoming.message.report, present=present)
            shares[:] = [share]
            return book

        await self._write(end)
        self.counts["finished" if shares[0] else "refused"] += 1
        return PhaseFinished(share=shares[0])

    async def _write(self, change: Callable[[PhaseBook, set[str]], PhaseBook]) -> None:
        if not self._lease.token:
            raise RetryableError("this peer does not coordinate (any more): ask the one that does")
        async with self._turn:
            for _ in range(ATTEMPTS):
                entry = await self._store.get(PHASES_KEY)
                if entry is None or entry.value is None:
                    book, revision = new_book(self._grid), 0
                else:
                    book, revision = decode(PhaseBook, entry.value), entry.revision
                present = {p.peer for p in self._session.roster if p.state in ("alive", "suspect")}
                after = change(book, present)
                if after is book:
                    return
                try:
                    await self._store.put(PHASES_KEY, encode(after), expected=revision)
                except RevisionConflictError:
                    self.counts["conflicts"] += 1  # an earlier coordinator wrote last: its book counts
                else:
                    return
        raise RetryableError("the book of phases is being written by another coordinator: ask again")


class PhaseLeases:
    """A trainer's phases, from the coordinator; it waits while there is none."""

    def __init__(self, run: Joined, coordinators: LeaseView, grid: Grid) -> None:
        self.counts: Counter[str] = Counter()
        self._run = run
        self._coordinators = coordinators
        self._grid = grid

    @classmethod
    def open(cls, run: Joined, grid: Grid) -> Self:
        """Follow who coordinates the run, until it is left."""
        coordinators = LeaseView()
        watch = run.call(run.peer.session.hub.store("lease").watch(coordinators.apply))
        run.attach(watch.cancel)
        return cls(run, coordinators, grid)

    def take(self) -> PhaseTaken:
        """The next phase; StoppedError as soon as this peer is to leave."""
        return self._until_answered(TakePhase(levels=self._grid.levels), PhaseTaken)

    def finish(self, report: Report) -> float:
        """For which share of a phase it counts."""
        return self._until_answered(FinishPhase(levels=self._grid.levels, report=report), PhaseFinished).share

    def _until_answered(self, request: Message, reply: type[M]) -> M:
        while True:
            self._run.check()
            if self._run.is_leaving():
                raise StoppedError("this peer leaves the run")
            try:
                return self._ask(request, reply)
            except ConfigurationError:
                raise
            except PotluckError as error:
                self.counts["unanswered"] += 1
                logger.debug("no phase just now, asking again: %s", error)
                time.sleep(RETRY_SECONDS)

    def _ask(self, request: Message, reply: type[M]) -> M:
        coordinator = self._coordinators.holder
        if coordinator is None:
            raise RetryableError("nobody coordinates just now")
        links = self._run.peer.links
        return self._run.call(links.request(coordinator, request, reply=reply, timeout_seconds=ASK_SECONDS)).message


async def read_book(hub: HubConnection) -> PhaseBook | None:
    """The book as it is now; None: nobody has asked for a phase yet."""
    entry = await hub.store(STORE).get(PHASES_KEY)
    return decode(PhaseBook, entry.value) if entry is not None and entry.value is not None else None
