"""Who trains which path (pure): phases are leased like shards.

A *phase* is H inner steps on one path. The book says how many phases of each path are done, and who is at work on the
next. It stands in the hub, written by the coordinator alone and by compare-and-set, so the next coordinator goes on
with it as it is.

    a peer is gone         its lease returns when somebody asks, and the same phase is given to another
    fewer peers than paths they take turns: a peer that asks gets, of the paths that nobody has, the one furthest behind
    more peers than paths  several share a phase; the first that is done fixes how many, and each counts for its share

*A phase counts once.* What a peer has trained counts when the book takes it from the holder of the lease. A peer that
was believed dead, and whose phase another has, is told that its work does not count. A peer that dies after that and
before its modules' rounds has lost the phase: it counts in none, rather than twice.

`needs` says from which epochs of its modules on the next phase of a path may begin: those that hold the one before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated

import msgspec

from potluck.errors import ConfigurationError
from potluck.messages import Message
from potluck.paths.grid import MAX_PATHS, Grid

PHASES_KEY = "phases"  # where the book stands, in the store of shards

Count = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(max_length=128)]


class Lease(Message, frozen=True, kw_only=True):
    """One peer's work on a phase."""

    path: Annotated[int, msgspec.Meta(ge=0, lt=MAX_PATHS)]  # its number
    phase: Count
    token: Count  # larger with each lease
    since: float = 0.0  # hub time
    share: float = 1.0  # of the phase, that its holder counts for
    is_fixed: bool = False  # another who shares it was done: nobody joins any more


class PathEntry(Message, frozen=True, kw_only=True):
    """How far one path is."""

    done: Count = 0  # phases
    needs: dict[Name, int] = {}  # epochs of its modules that hold the last phase
    last: Name = ""  # who trained it last
    is_over: bool = False  # it stopped early: its validation loss does not fall any more
    loss: float | None = None  # of its last phase
    validation: float | None = None
    best: float | None = None  # validation loss
    tokens: Count = 0  # trained on so far
    returned: Count = 0  # leases that came back because their peers were gone


class PhaseBook(Message, frozen=True, kw_only=True):
    """All paths, and who is at work."""

    levels: tuple[int, ...]
    entries: tuple[PathEntry, ...] = ()
    leases: dict[Name, Lease] = {}  # by peer
    last_token: Count = 0

    def holders(self, path: int, phase: int | None = None) -> list[str]:
        """Who is at work on a path."""
        return [p for p, lease in self.leases.items() if lease.path == path and phase in (None, lease.phase)]

    @property
    def fewest_done(self) -> int:
        """Phases of the path that is furthest behind, of those that go on."""
        going_on = [entry.done for entry in self.entries if not entry.is_over]
        return min(going_on, default=max((entry.done for entry in self.entries), default=0))


class Report(Message, frozen=True, kw_only=True):
    """What a peer says of a phase that it has trained."""

    token: Count
    needs: dict[Name, int] = {}
    loss: float | None = None
    validation: float | None = None
    best: float | None = None
    tokens: Count = 0
    is_over: bool = False


def new_book(grid: Grid) -> PhaseBook:
    """Nothing is trained yet."""
    return PhaseBook(levels=grid.levels, entries=(PathEntry(),) * grid.num_paths)


def check_same_paths(book: PhaseBook, levels: tuple[int, ...]) -> None:
    """ConfigurationError when a peer has other paths than the run."""
    if book.levels != tuple(levels):
        raise ConfigurationError(f"the run has levels = {list(book.levels)} and this peer {list(levels)}")


def returned(book: PhaseBook, present: Collection[str]) -> PhaseBook:
    """Without the leases of those who are gone."""
    gone = [peer for peer in book.leases if peer not in present]
    if not gone:
        return book
    entries = list(book.entries)
    for peer in gone:
        number = book.leases[peer].path
        entries[number] = msgspec.structs.replace(entries[number], returned=entries[number].returned + 1)
    leases = {peer: lease for peer, lease in book.leases.items() if peer in present}
    return msgspec.structs.replace(book, leases=leases, entries=tuple(entries))


def take(
    book: PhaseBook, peer: str, *, present: Collection[str], now: float = 0.0, end: int = 0
) -> tuple[PhaseBook, Lease | None]:
    """The book after a peer was given a phase, and the lease; None: nothing is free now.

    What it had before, and has not finished, is given back. `end` is the number of phases after which a path is done;
    0: it goes on.
    """
    book = returned(book, {*present, peer})
    leases = {other: lease for other, lease in book.leases.items() if other != peer}
    holders: dict[int, int] = {}
    for lease in leases.values():
        holders[lease.path] = holders.get(lease.path, 0) + 1
    going_on = _going_on(book, end)
    num_paths = sum(not entry.is_over for entry in book.entries)
    if len(leases) < num_paths:  # fewer peers than paths: who finds none free waits, since another may come back
        going_on = [number for number in going_on if number not in holders]
    if not going_on:
        return msgspec.structs.replace(book, leases=leases), None

    def order(number: int) -> tuple[int, int, int, int]:
        entry = book.entries[number]
        liking = 0 if entry.last == peer else 2 if entry.last in present else 1  # its state is here; or nobody's
        return holders.get(number, 0), entry.done, liking, number

    number = min(going_on, key=order)
    lease = Lease(path=number, phase=book.entries[number].done, token=book.last_token + 1, since=now)
    return msgspec.structs.replace(book, leases={**leases, peer: lease}, last_token=lease.token), lease


def is_all_done(book: PhaseBook, end: int = 0) -> bool:
    """Whether nothing is left to train."""
    return not _going_on(book, end)


def _going_on(book: PhaseBook, end: int) -> list[int]:
    return [
        number for number, entry in enumerate(book.entries) if not entry.is_over and not (end and entry.done >= end)
    ]


def finish(book: PhaseBook, peer: str, report: Report, *, present: Collection[str]) -> tuple[PhaseBook, float]:
    """The book after a peer has trained its phase, and for which share of a phase that counts; 0: it does not.

    The first of those who share a phase makes it done. It counts for one over as many as were at work then, and so does
    each of the others when it comes.
    """
    held = book.leases.get(peer)
    if held is None or held.token != report.token:
        return book, 0.0
    book = returned(book, {*present, peer})
    leases = {other: lease for other, lease in book.leases.items() if other != peer}
    entry = book.entries[held.path]
    share = held.share
    if not held.is_fixed:
        sharing = [other for other, lease in leases.items() if (lease.path, lease.phase) == (held.path, held.phase)]
        share = 1.0 / (1 + len(sharing))
        for other in sharing:
            leases[other] = msgspec.structs.replace(leases[other], share=share, is_fixed=True)
    entries = list(book.entries)
    entries[held.path] = msgspec.structs.replace(
        entry,
        done=max(entry.done, held.phase + 1),
        needs=_later(entry.needs, report.needs),
        last=peer,
        is_over=entry.is_over or report.is_over,
        loss=report.loss,
        validation=report.validation if report.validation is not None else entry.validation,
        best=report.best if report.best is not None else entry.best,
        tokens=entry.tokens + report.tokens,
    )
    return msgspec.structs.replace(book, leases=leases, entries=tuple(entries)), share


def _later(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in {**one, **other}}


def open_modules(book: PhaseBook, grid: Grid) -> tuple[str, ...]:
    """Modules of which somebody has trained a phase that is still free on another path.

    The next peer takes that path. So a peer that has changes for such a module waits before it offers them: it may
    be the one, and then they travel together.
    """
    taken = {lease.path for lease in book.leases.values()}
    found = []
    for module in grid.modules:
        numbers = [grid.number_of(path) for path in grid.paths_through(module)]
        most = max(book.entries[number].done for number in numbers)
        if any(book.entries[n].done < most and n not in taken and not book.entries[n].is_over for n in numbers):
            found.append(module)
    return tuple(found)
