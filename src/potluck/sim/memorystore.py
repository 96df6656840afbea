"""The stores of a MemoryHub."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from potluck.errors import (
    DeadlineExceededError,
    HubUnavailableError,
    NobodyAnswersError,
    PermissionDeniedError,
    RevisionConflictError,
)
from potluck.hub.connection import Entry
from potluck.hub.nats.watchledger import WatchLedger
from potluck.hub.stores import DELETED_FOR_SECONDS, check_key, check_prefix, check_ttl

if TYPE_CHECKING:
    from potluck.sim.memoryconnection import MemoryConnection
    from potluck.sim.memoryhub import MemoryHub

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0  # how long a write waits that the hub holds back


@dataclass(frozen=True, slots=True)
class _Change:
    entry: Entry
    previous: int  # the revision that it followed on its key; 0: none


class MemoryTable:
    """One store: the newest version of each key, marks of deletions included."""

    def __init__(self, hub: MemoryHub, name: str) -> None:
        self.name = name
        self.has_leader = True
        self._hub = hub
        self._revision = 0
        self._overdue: list[Entry] = []
        self._versions: dict[str, Entry] = {}
        self._watches: dict[MemoryWatch, None] = {}
        self.num_answers_to_lose = 0  # of so many writes that are carried out, nobody learns it

    def version(self, key: str) -> Entry | None:
        """The newest version of a key."""
        return self._versions.get(key)

    def versions(self, prefix: str) -> list[Entry]:
        """The newest versions of all keys with this prefix."""
        return [entry for key, entry in self._versions.items() if key.startswith(prefix)]

    def write(self, key: str, value: bytes | None, ttl_seconds: float | None) -> int:
        """Write a version (None: the mark of a deletion), tell the watchers, and return its revision."""
        self._revision += 1
        before = self._versions.get(key)
        entry = Entry(key=key, value=value, revision=self._revision, written_at=self._hub.clock.wall())
        self._versions[key] = entry
        change = _Change(entry, before.revision if before is not None else 0)
        subject = self._hub.subjects.store_change(self.name, key)
        self._hub.deliver(subject, lambda: self._tell(change))
        if ttl_seconds is not None:
            self._hub.call_later(ttl_seconds, lambda: self._expire(entry))
        return entry.revision

    def lead(self) -> None:
        """There is a leader again; what is overdue expires before anybody writes."""
        self.has_leader = True
        overdue, self._overdue = self._overdue, []
        for entry in overdue:
            self._expire(entry)

    def follow(self, watch: MemoryWatch) -> None:
        """Tell a watch of every change from now on."""
        self._watches[watch] = None

    def leave(self, watch: MemoryWatch) -> None:
        """Tell it no more."""
        self._watches.pop(watch, None)

    def _tell(self, change: _Change) -> None:
        for watch in self._watches:
            watch.arrive(change)

    def _expire(self, entry: Entry) -> None:
        if self._versions.get(entry.key) is not entry:
            return  # written again meanwhile
        if not self.has_leader:
            self._overdue.append(entry)
            return
        if entry.value is None:
            del self._versions[entry.key]
        else:
            self.write(entry.key, None, DELETED_FOR_SECONDS)


class MemoryStore:
    """A Store on a MemoryTable, over one connection and with its permissions."""

    def __init__(self, connection: MemoryConnection, name: str) -> None:
        self._connection = connection
        self._name = name
        self._subjects = connection.hub.subjects

    async def get(self, key: str) -> Entry | None:
        """The newest version of a key; None when there is none or it was deleted."""
        entry = self._readable().version(check_key(key))
        return entry if entry is not None and entry.value is not None else None

    async def entries(self, prefix: str = "") -> list[Entry]:
        """All live keys that start with `prefix`, by key."""
        versions = self._readable().versions(check_prefix(prefix))
        return sorted((entry for entry in versions if entry.value is not None), key=lambda entry: entry.key)

    async def put(
        self, key: str, value: bytes, *, expected: int | None = None, ttl_seconds: float | None = None
    ) -> int:
        """Write a key and return its revision; see Store."""
        ttl_seconds = check_ttl(ttl_seconds)
        table = self._writable(key)
        written: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def arrive() -> None:
            """The hub carries it out, be it late and whether or not anybody still waits for the answer."""
            try:
                self._check_expected(table, key, expected)
                revision = table.write(key, bytes(value), ttl_seconds)
            except RevisionConflictError as error:
                if not written.done():
                    written.set_exception(error)
            else:
                if not written.done():
                    written.set_result(revision)

        self._connection.hub.deliver(self._subjects.store_write(self._name, key), arrive)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                revision = await written
        except TimeoutError:
            raise DeadlineExceededError(f"the write of {key} was not answered: it may or may not come") from None
        if table.num_answers_to_lose:
            table.num_answers_to_lose -= 1
            raise HubUnavailableError(f"the answer to the write of {key} was lost")
        return revision

    async def delete(self, key: str, *, expected: int | None = None) -> None:
        """Delete a key; a missing one is no error."""
        table = self._writable(key)
        self._check_expected(table, key, expected)
        if expected != 0:
            table.write(key, None, DELETED_FOR_SECONDS)

    async def watch(self, handler: Callable[[Entry], None], prefix: str = "") -> MemoryWatch:
        """Call `handler` for every live key, then for every change; see Store."""
        self._connection.check_may_listen(self._subjects.store_change(self._name, f"{check_prefix(prefix)}>"))
        watch = MemoryWatch(self._connection, self._readable(), handler, prefix)
        watch.start()
        return watch

    def _readable(self) -> MemoryTable:
        self._connection._check_usable()
        through_guard = self._subjects.read(self._connection.peer, self._name)
        directly = f"$JS.API.DIRECT.GET.{self._subjects.stream(self._name)}"
        if not self._connection.may_publish(through_guard, directly):
            raise PermissionDeniedError(f"this member may not publish on {directly}")
        return self._connection.hub.table(self._name)

    def _writable(self, key: str) -> MemoryTable:
        self._connection._check_usable()
        subject = self._subjects.store_write(self._name, check_key(key))
        through_guard = self._subjects.write(self._connection.peer, self._name, key)
        if not self._connection.may_publish(through_guard, subject):
            raise PermissionDeniedError(f"this member may not publish on {subject}")
        table = self._connection.hub.table(self._name)
        if not table.has_leader:
            raise NobodyAnswersError(f"nobody answers on {subject}: the store has no leader")
        return table

    def _check_expected(self, table: MemoryTable, key: str, expected: int | None) -> None:
        present = table.version(key)
        if expected is None or expected == (present.revision if present is not None else 0):
            return
        if expected == 0 and present is not None and present.value is None:
            return
        raise RevisionConflictError(
            f"{key} in the store {self._name} no longer has revision {expected}: somebody else changed it first"
        )


class MemoryWatch:
    """One watch. Made by MemoryStore.watch."""

    def __init__(
        self, connection: MemoryConnection, table: MemoryTable, handler: Callable[[Entry], None], prefix: str
    ) -> None:
        self._connection = connection
        self._table = table
        self._handler = handler
        self._prefix = prefix
        self._ledger = WatchLedger()

    def start(self) -> None:
        """Tell the present keys, then follow."""
        self._connection._watches[self] = None
        self._table.follow(self)
        self.sync()

    async def cancel(self) -> None:
        """Stop. Idempotent."""
        self._connection._watches.pop(self, None)
        self._table.leave(self)

    def sync(self) -> None:
        """Look at the whole store, and tell what is new."""
        self._ledger.begin_sync()
        for entry in self._ledger.end_sync(self._table.versions(self._prefix)):
            self._tell(entry)

    def arrive(self, change: _Change) -> None:
        """A change was made."""
        if self._connection.is_connected and change.entry.key.startswith(self._prefix):
            self._connection._soon(lambda: self._take(change))

    def _take(self, change: _Change) -> None:
        if self not in self._connection._watches:
            return
        gap = self._ledger.shows_gap(change.entry.key, change.previous)
        if self._ledger.observe(change.entry):
            self._tell(change.entry)
        if gap:
            self.sync()

    def _tell(self, entry: Entry) -> None:
        try:
            self._handler(entry)
        except Exception:  # a change's journey ends here: the next one must still be told
            self._connection.dispatched.handler_errors += 1
            logger.exception("a watcher of the store %s failed on the key %s", self._table.name, entry.key)
