"""What a watch has told so far, and what it still must tell (pure).

Changes come live, one by one, and now and then as a snapshot of the whole store (at the start, after a reconnect,
when something was missed). The ledger merges the two: each key's changes are told in order, none twice, and a key
that is missing from a snapshot is told as deleted.

Normally the revision orders the versions of a key. When the hub's data was lost, revisions start again from 1: the
time of writing then shows that a version is new.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from potluck.hub.connection import Entry

MAX_DEAD_KEYS = 4096  # deleted keys that are remembered, so that an old word about them is known as old


@dataclass(frozen=True, slots=True)
class _Known:
    revision: int
    written_at: float
    live: bool


@dataclass(slots=True)
class _Sync:
    """What happened since a snapshot was asked for."""

    before: int = 0  # the horizon then
    changed: set[str] = field(default_factory=set)
    horizon: int = 0


class WatchLedger:
    """The versions that one watch knows of."""

    def __init__(self) -> None:
        self.horizon = 0
        """The newest revision seen, over all keys."""
        self._known: dict[str, _Known] = {}
        self._num_dead = 0
        self._newest_at = 0.0
        self._sync: _Sync | None = None

    def observe(self, entry: Entry) -> bool:
        """Take in one version; whether to tell it. A deletion is told only of a key that was told before."""
        known = self._known.get(entry.key)
        if known is not None and entry.revision <= known.revision and entry.written_at <= known.written_at:
            return False
        if self._sync is not None:
            self._sync.changed.add(entry.key)
            self._sync.horizon = max(self._sync.horizon, entry.revision)
        self._remember(entry)
        return entry.value is not None or (known is not None and known.live)

    def shows_gap(self, key: str, previous: int) -> bool:
        """Whether a change that follows `previous` (0: nothing) on its key means that we missed that one.

        Asked before the change is observed. While a snapshot is on its way, it closes such gaps anyway.
        """
        known = self._known.get(key)
        return self._sync is None and previous > (known.revision if known is not None else 0)

    def begin_sync(self) -> None:
        """A snapshot is about to be taken; changes go on coming."""
        self._sync = _Sync(before=self.horizon)

    def trusts(self, snapshot: Collection[Entry]) -> bool:
        """Whether a snapshot has all the keys that were told, and is as new as what we know.

        Else it may come from a replica that lags behind, or a key may have changed just as it was taken: then another
        look shows whether the key has really gone.
        """
        sync = self._sync or _Sync()
        newest = max((entry.revision for entry in snapshot), default=0)
        return newest >= sync.before and not self._vanished(snapshot, sync.changed)

    def end_sync(self, snapshot: Collection[Entry]) -> list[Entry]:
        """Take in the snapshot, marks of deletions included; return what to tell."""
        sync, self._sync = self._sync or _Sync(), None
        versions = sorted(snapshot, key=lambda entry: entry.revision)
        to_tell = [entry for entry in versions if self.observe(entry)]
        for key in self._vanished(versions, sync.changed):
            revision = max(self.horizon, self._known[key].revision + 1)
            gone = Entry(key=key, value=None, revision=revision, written_at=self._newest_at)
            self._remember(gone)
            to_tell.append(gone)
        # It may be lower than before: when the newest mark of a deletion has gone, or the hub's data was lost.
        self.horizon = max([sync.horizon, *(entry.revision for entry in versions)])
        return to_tell

    def abort_sync(self) -> None:
        """No snapshot could be fetched."""
        self._sync = None

    def _vanished(self, snapshot: Collection[Entry], changed: Collection[str]) -> list[str]:
        present = {entry.key for entry in snapshot}.union(changed)
        return [key for key, known in self._known.items() if known.live and key not in present]

    def _remember(self, entry: Entry) -> None:
        before = self._known.pop(entry.key, None)  # to stand last: the oldest word comes first in a dict
        self._num_dead += (entry.value is None) - (before is not None and not before.live)
        self._known[entry.key] = _Known(entry.revision, entry.written_at, entry.value is not None)
        self.horizon = max(self.horizon, entry.revision)
        self._newest_at = max(self._newest_at, entry.written_at)
        if self._num_dead > MAX_DEAD_KEYS:
            dead = [key for key, known in self._known.items() if not known.live]
            for key in dead[: len(dead) // 2]:
                del self._known[key]
            self._num_dead -= len(dead) // 2
