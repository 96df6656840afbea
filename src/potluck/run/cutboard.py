"""What the hub has about cuts (cuts.py): the records, and a board that follows them.

All of it stands in the store `groups`: under `cut.` what concerns all groups, under `cutpart.` how far each is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Annotated, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from potluck.errors import ProtocolError
from potluck.hub.connection import Entry, Store, Subscription
from potluck.messages import Message, decode, encode
from potluck.peer.groupsession import STORE
from potluck.peer.session import Session

logger = logging.getLogger(__name__)

PREFIX = "cut."
WANTED, SAFE, RETURN, MADE = f"{PREFIX}wanted", f"{PREFIX}safe", f"{PREFIX}return", f"{PREFIX}made."
PARTS = "cutpart."
MAX_GROUPS = 1024

Counted = Annotated[int, msgspec.Meta(ge=0, lt=2**48)]
Text = Annotated[str, msgspec.Meta(max_length=500)]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
R = TypeVar("R", bound=Message)


class CutPart(Message, frozen=True, kw_only=True):
    """The state of one group in a cut."""

    epoch: Counted
    digest: Digest
    common: Digest  # of what all peers hold alike; where nothing is a peer's own, the same
    num_bytes: Counted


class Cut(Message, frozen=True, kw_only=True):
    """One committed epoch per group; written once."""

    number: Counted
    parts: Annotated[dict[str, CutPart], msgspec.Meta(max_length=MAX_GROUPS)]
    coordinator: Annotated[str, msgspec.Meta(max_length=128)]  # of main, who proposed it
    made_at: float  # hub time

    @property
    def epochs(self) -> dict[str, int]:
        """By group."""
        return {group: part.epoch for group, part in sorted(self.parts.items())}

    def describe(self) -> str:
        """In one line."""
        return f"cut {self.number} ({', '.join(f'{group} at epoch {epoch}' for group, epoch in self.epochs.items())})"


class WantedCut(Message, frozen=True, kw_only=True):
    """What the coordinator of main wants to make a cut of; -1: whichever epoch is the newest."""

    number: Counted
    epochs: Annotated[dict[str, int], msgspec.Meta(max_length=MAX_GROUPS)]


class SafeCut(Message, frozen=True, kw_only=True):
    """The newest cut that is on trusted disks."""

    number: Counted
    num_returns: Counted = 0  # how often a group went back to a cut


class ReturnOrder(Message, frozen=True, kw_only=True):
    """An order to all groups to go back to a cut."""

    order: Counted  # they are counted
    number: Counted  # of the cut
    of_manifest: Counted = 0  # the organiser's order that it is part of, by which `main` goes back; 0: a program's


class PartRecord(Message, frozen=True, kw_only=True):
    """How far one group is with its part of a cut."""

    number: Counted
    part: CutPart | None = None  # None: the group has no state yet, or there is trouble
    is_saved: bool = False
    trouble: Text = ""  # why there is no part


class AskForCut(Message, frozen=True, kw_only=True, tag="cut.ask"):
    """To the coordinator of main, from a program: make a cut now, or go back to one."""

    epochs: Annotated[dict[str, int], msgspec.Meta(max_length=MAX_GROUPS)] = {}
    return_to: Counted = 0


class CutNumber(Message, frozen=True, kw_only=True, tag="cut.number"):
    """The answer: which number it has, or why there is none; `order` of a return."""

    number: Counted = 0
    order: Counted = 0
    trouble: Text = ""


class CutBoard:
    """What the hub has about cuts. All users in a process share one; each calls `start` and `close` once."""

    def __init__(self, store: Store) -> None:
        self.wanted: WantedCut | None = None
        self.safe: SafeCut | None = None
        self.returning: ReturnOrder | None = None
        self.made: dict[int, Cut] = {}
        self.safe_revision = 0
        self.return_revision = 0
        self._store = store
        self._listeners: list[Callable[[], None]] = []
        self._changed = asyncio.Event()
        self._num_users = 0
        self._starting = asyncio.Lock()
        self._watch: Subscription | None = None

    async def start(self) -> None:
        """Follow the store; what stands there now is known when this returns."""
        self._num_users += 1
        async with self._starting:
            if self._watch is None:
                self._watch = await self._store.watch(self._took, PREFIX)

    async def close(self) -> None:
        """The last user has the following end."""
        self._num_users = max(self._num_users - 1, 0)
        watch = self._watch
        if self._num_users == 0 and watch is not None:
            self._watch = None
            await watch.cancel()

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after each change; the returned function ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a change that makes this true."""
        while not condition():
            changed = self._changed
            await changed.wait()

    # What is known

    def latest(self) -> Cut | None:
        """The newest cut that is on trusted disks."""
        return self.made.get(self.safe.number) if self.safe is not None else None

    def safe_for(self, group: str) -> Cut | None:
        """The newest safe cut that a group is part of; where the newest is without it, an earlier one counts."""
        newest = self.safe.number if self.safe is not None else 0
        numbers = [number for number, cut in self.made.items() if number <= newest and group in cut.parts]
        return self.made[max(numbers)] if numbers else None

    @property
    def last_number(self) -> int:
        """The largest number that was given to a cut, made or not."""
        wanted = self.wanted.number if self.wanted is not None else 0
        return max([wanted, self.safe.number if self.safe is not None else 0, *self.made])

    # What a coordinator writes; RevisionConflictError when somebody else was first

    async def want(self, wanted: WantedCut) -> None:
        """Ask all groups for their parts."""
        await self._store.put(WANTED, encode(wanted))

    async def make(self, cut: Cut) -> None:
        """Write a cut, once."""
        await self._store.put(f"{MADE}{cut.number}", encode(cut), expected=0)

    async def forget(self, number: int) -> None:
        """Nobody can go back to it any more."""
        await self._store.delete(f"{MADE}{number}")

    async def declare_safe(self, number: int, *, expected: int) -> None:
        """All of its parts are on trusted disks; unless a group has gone back since revision `expected`."""
        num_returns = self.safe.num_returns if self.safe is not None else 0
        await self._store.put(SAFE, encode(SafeCut(number=number, num_returns=num_returns)), expected=expected)

    async def note_return(self, number: int) -> None:
        """A group goes back to this cut, so none that was begun before becomes safe any more."""
        if self.safe is not None and self.safe.number == number:
            record = SafeCut(number=number, num_returns=self.safe.num_returns + 1)
            await self._store.put(SAFE, encode(record), expected=self.safe_revision)

    async def order_return(self, order: ReturnOrder) -> None:
        """Have all groups of a cut go back to it."""
        await self._store.put(RETURN, encode(order), expected=self.return_revision)

    async def put_part(self, group: str, record: PartRecord) -> None:
        """Say how far a group is."""
        await self._store.put(f"{PARTS}{group}", encode(record))

    async def part(self, group: str) -> PartRecord | None:
        """How far a group is."""
        entry = await self._store.get(f"{PARTS}{group}")
        return read(PartRecord, entry) if entry is not None else None

    async def watch_parts(self, handler: Callable[[str, PartRecord], None]) -> Subscription:
        """Hear of all groups' parts; for the coordinator of main."""

        def took(entry: Entry) -> None:
            record = read(PartRecord, entry)
            if record is not None:
                handler(entry.key.removeprefix(PARTS), record)

        return await self._store.watch(took, PARTS)

    def _took(self, entry: Entry) -> None:
        if entry.key == WANTED:
            self.wanted = read(WantedCut, entry) or self.wanted
        elif entry.key == SAFE:
            self.safe, self.safe_revision = read(SafeCut, entry) or self.safe, entry.revision
        elif entry.key == RETURN:
            self.returning, self.return_revision = read(ReturnOrder, entry) or self.returning, entry.revision
        elif entry.key.startswith(MADE):
            self._took_cut(entry)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        for listener in list(self._listeners):
            listener()

    def _took_cut(self, entry: Entry) -> None:
        number = entry.key.removeprefix(MADE)
        cut = read(Cut, entry)
        if cut is not None and str(cut.number) == number:
            self.made[cut.number] = cut
        elif entry.value is None and number.isdigit():
            self.made.pop(int(number), None)


_BOARDS: WeakKeyDictionary[Session, CutBoard] = WeakKeyDictionary()


def read(kind: type[R], entry: Entry) -> R | None:
    try:
        return decode(kind, entry.value) if entry.value is not None else None
    except ProtocolError as error:
        logger.warning("%s in the hub cannot be read and is passed over: %s", entry.key, error)
        return None


def board_of(session: Session) -> CutBoard:
    """The one of this peer; to be started."""
    return _BOARDS.setdefault(session, CutBoard(session.hub.store(STORE)))
