"""One heartbeat for all groups that a peer coordinates, and the heartbeats of others.

A lease that renews itself costs the hub a synced write each 0.75 s; 64 groups would make that 85 a second. So the lease
of a group other than `main` is written once in a term (grouplease.py) and names its holder. What is renewed is one
record of the *holder*, `holder.PEER` in the store `groups`, by a compare-and-set on its own last write, for as long as
it holds any group.

To take a group from a holder, a candidate first *ends* the holder: it deletes that record, by a compare-and-set on the
last heartbeat that it saw. Then the holder's next heartbeat fails, whatever groups it held, and all of them are free.
So a heartbeat that succeeds proves that nobody had taken any of the holder's groups when it was sent.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass
from typing import Protocol

from potluck import tasks
from potluck.clock import Clock
from potluck.errors import AccessError, NobodyAnswersError, ProtocolError, RetryableError, RevisionConflictError
from potluck.hub.connection import Entry, Store, Subscription
from potluck.messages import Message, decode, encode

logger = logging.getLogger(__name__)

PREFIX = "holder."
BEAT_EVERY_SECONDS = 0.75
TRY_AGAIN_SECONDS = 0.1  # while the hub does not take it
WRITE_SECONDS = 1.0  # a write that takes longer counts as unanswered
TTL_SECONDS = 20
IMPOSSIBLE_REVISION = 1 << 53


class HolderRecord(Message, frozen=True, kw_only=True):
    """What stands under `holder.PEER`."""

    session: str


class HeldLease(Protocol):
    """A lease that lives by the heartbeat."""

    def beaten(self, sent: float) -> None:
        """A heartbeat that was sent at this time has succeeded."""
        ...

    def extended(self) -> None:
        """Nobody can write in the hub's store now, neither we nor those who would replace us."""
        ...

    def ended(self) -> None:
        """Somebody has ended this holder: the lease is not ours any more."""
        ...


@dataclass(frozen=True, slots=True)
class Seen:
    """The newest heartbeat of a holder."""

    session: str
    revision: int
    at: float  # by our monotonic clock


class Heartbeat:
    """This peer's heartbeat, and those of all holders. All leases of a peer share one."""

    def __init__(self, store: Store, self_id: str, session: str, clock: Clock) -> None:
        self._store = store
        self._self_id = self_id
        self._session = session
        self._clock = clock
        self._key = PREFIX + self_id
        self._seen: dict[str, Seen] = {}
        self._held: dict[HeldLease, None] = {}
        self._revision = 0  # of our last heartbeat; 0: there is none
        self._unanswered_since: float | None = None
        self._num_users = 0
        self._writing = asyncio.Lock()
        self._trying = asyncio.Lock()
        self._tried_at = -math.inf  # whether the store has a leader
        self._refusal: str | None = None  # what was the answer: it had none
        self._watch: Subscription | None = None
        self._task: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self.num_beats = 0
        self.num_tries = 0

    async def start(self) -> None:
        """Follow all heartbeats; to be called once by each user, and `close` as often."""
        self._num_users += 1
        async with self._starting:
            if self._watch is None:
                self._watch = await self._store.watch(self._changed, PREFIX)

    async def close(self) -> None:
        """The last user is gone: beat and follow no more."""
        self._num_users -= 1
        if self._num_users > 0:
            return
        await tasks.end(self._task)
        self._task = None
        watch, self._watch = self._watch, None
        if watch is not None:
            await watch.cancel()

    # Others

    def seen(self, peer: str) -> Seen | None:
        """The newest heartbeat of a holder, as far as we were told."""
        return self._seen.get(peer)

    async def look(self, peer: str) -> Seen | None:
        """The same, as it stands in the store."""
        entry = await self._store.get(PREFIX + peer)
        if entry is None:
            self._seen.pop(peer, None)
        elif (known := self._seen.get(peer)) is None or known.revision < entry.revision:
            self._changed(entry)
        return self._seen.get(peer)

    async def end(self, peer: str) -> bool:
        """End a holder by its last heartbeat that we saw; False if it has beaten meanwhile."""
        seen = self._seen.get(peer) or await self.look(peer)
        if seen is None:
            return True
        try:
            await self._store.delete(PREFIX + peer, expected=seen.revision)
        except RevisionConflictError:
            return await self.look(peer) is None
        self._seen.pop(peer, None)
        return True

    async def try_store(self) -> None:
        """Find out whether the store has a leader, without writing: NobodyAnswersError when it has none.

        All leases of this peer ask it at once when a holder is silent: one question serves them all.
        """
        async with self._trying:
            if self._clock.monotonic() - self._tried_at >= TRY_AGAIN_SECONDS / 2:
                self._refusal = None
                try:
                    await self._store.put(self._key, b"", expected=IMPOSSIBLE_REVISION)
                except RevisionConflictError:
                    self.num_tries += 1
                except NobodyAnswersError as error:
                    self._refusal = str(error)
                self._tried_at = self._clock.monotonic()
            if self._refusal is not None:
                raise NobodyAnswersError(self._refusal)

    # Our own

    async def ensure(self) -> float:
        """Have a heartbeat of ours in the store, from now on; when the newest one was sent."""
        sent = self._clock.monotonic()
        if not self._held:
            await self._beat()
        return sent

    def hold(self, lease: HeldLease) -> None:
        """Beat for this lease too."""
        self._held[lease] = None
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="lease: heartbeat")

    def drop(self, lease: HeldLease) -> None:
        """Beat no more for this lease; without any, the record ends by itself."""
        self._held.pop(lease, None)

    async def _run(self) -> None:
        while self._held:
            pause_seconds = TRY_AGAIN_SECONDS
            try:
                async with asyncio.timeout(WRITE_SECONDS):
                    await self._beat()
                pause_seconds = BEAT_EVERY_SECONDS
            except NobodyAnswersError:
                for lease in list(self._held):
                    lease.extended()
            except (RetryableError, TimeoutError) as error:
                logger.debug("no heartbeat just now: %r", error)
            except AccessError as error:
                logger.warning("this peer may not coordinate (any more): %s", error)
                self._end_all()
            await asyncio.sleep(pause_seconds)

    async def _beat(self) -> None:
        async with self._writing:
            sent = self._clock.monotonic()
            if self._unanswered_since is None:
                self._unanswered_since = sent
            record = encode(HolderRecord(session=self._session))
            try:
                revision = await self._store.put(self._key, record, expected=self._revision, ttl_seconds=TTL_SECONDS)
            except RevisionConflictError:
                await self._explain_conflict()
                return
            self._confirm(revision, sent)

    async def _explain_conflict(self) -> None:
        """A heartbeat of ours whose answer was lost, an earlier life's record, or the end."""
        entry = await self._store.get(self._key)
        record = _read(entry) if entry is not None else None
        if entry is not None and record is not None and record.session == self._session and self._revision:
            self._confirm(entry.revision, self._unanswered_since or 0.0)
            return
        self._end_all()
        self._revision = entry.revision if entry is not None else 0  # to begin anew
        if entry is None or record is None or record.session != self._session:
            raise RetryableError("this peer's heartbeat was ended, or is of an earlier life: it begins anew")

    def _confirm(self, revision: int, sent: float) -> None:
        self._revision = max(self._revision, revision)
        self._unanswered_since = None
        self.num_beats += 1
        for lease in list(self._held):
            lease.beaten(sent)

    def _end_all(self) -> None:
        self._revision = 0
        self._unanswered_since = None
        held, self._held = list(self._held), {}
        for lease in held:
            lease.ended()

    def _changed(self, entry: Entry) -> None:
        peer = entry.key.removeprefix(PREFIX)
        record = _read(entry)
        if record is None:
            self._seen.pop(peer, None)
            if peer == self._self_id and entry.revision > self._revision > 0:
                self._end_all()
            return
        self._seen[peer] = Seen(record.session, entry.revision, self._clock.monotonic())


def _read(entry: Entry) -> HolderRecord | None:
    try:
        return decode(HolderRecord, entry.value) if entry.value is not None else None
    except ProtocolError:
        return None
