"""Writing the roster: only what changed, the newest word on each peer, in step with other guards.

Each write is a compare-and-set on the entry's revision as this guard knows it. When another guard wrote meanwhile, its
word on another process of the peer stands unless we know that process to be an older one; on the same process ours is
written again, since it is the newer evidence.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from potluck import tasks
from potluck.errors import PotluckError, ProtocolError, RevisionConflictError
from potluck.hub.connection import Entry, Store, Subscription
from potluck.hub.guard.presencecore import PresenceCore, RosterChange
from potluck.hub.presence import Presence
from potluck.messages import decode, encode

logger = logging.getLogger(__name__)

PARALLEL_WRITES = 64
RETRY_SECONDS = 0.25
WRITE_SECONDS = (
    2.0  # a write on its way to a server that dies is never answered; a second one finds out what became of it
)
KEPT_OWN_WRITES = 4
MAX_CONFLICTS = 20  # of one write, before it is put off


class RosterWriter:
    """Keeps the `roster` store as the core says, and tells the core what other guards write."""

    def __init__(self, store: Store, core: PresenceCore) -> None:
        self._store = store
        self._core = core
        self._wanted: dict[str, Presence | None] = {}  # not written yet
        self._revisions: dict[str, int] = {}  # of each entry in the store
        self._own: dict[str, deque[bytes]] = {}  # what we wrote last, to tell it from what others write
        self._written: dict[str, list[asyncio.Future[None]]] = {}
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._watch: Subscription | None = None
        self.is_failing = False
        """Whether the last write did not get through."""
        self.num_writes = 0
        self.num_conflicts = 0
        self.num_invalid = 0

    async def start(self) -> None:
        """Load the roster into the core and follow it."""
        self._watch = await self._store.watch(self._changed)
        self._task = asyncio.create_task(self._run(), name="roster writer")

    async def stop(self) -> None:
        """Write no more. Idempotent."""
        await tasks.end(self._task)
        self._task = None
        if self._watch is not None:
            await self._watch.cancel()
            self._watch = None
        for futures in self._written.values():
            for future in futures:
                future.cancel()
        self._written.clear()

    def want(self, changes: list[RosterChange]) -> None:
        """Have these changes written soon; a later one for the same peer replaces an earlier one."""
        for change in changes:
            self._wanted[change.peer] = change.presence
        if changes:
            self._work.set()

    async def written(self, peer: str) -> None:
        """Wait until what was wanted for a peer stands in the store."""
        if peer not in self._wanted:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._written.setdefault(peer, []).append(future)
        await future

    @property
    def num_pending(self) -> int:
        """How many entries wait to be written."""
        return len(self._wanted)

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            while self._wanted:
                batch = list(self._wanted)[:PARALLEL_WRITES]
                done = await asyncio.gather(*(self._write(peer) for peer in batch))
                if not all(done):
                    await asyncio.sleep(RETRY_SECONDS)

    async def _write(self, peer: str) -> bool:
        """Bring one entry up to date; False when the hub could not be reached and it has to be tried again."""
        if peer not in self._wanted:  # another guard's word was taken over meanwhile
            return True
        presence = self._wanted[peer]
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                self.num_writes += await self._put(peer, presence)
        except (PotluckError, TimeoutError) as error:  # whatever the hub objects to: the roster must be written
            if not self.is_failing:
                self.is_failing = True
                logger.warning("the roster cannot be written now, trying on: %r", error)
            return False
        if self.is_failing:
            self.is_failing = False
            logger.info("the roster can be written again")
        # Something newer may be wanted by now.
        if peer in self._wanted and self._wanted[peer] is presence:
            self._settle(peer)
        return True

    async def _put(self, peer: str, presence: Presence | None) -> bool:
        """Write one entry, unless another guard's word on it stands; whether it was written."""
        expected = self._revisions.get(peer, 0)
        for _ in range(MAX_CONFLICTS):
            try:
                if presence is None:
                    await self._store.delete(peer, expected=expected)
                    self._revisions.pop(peer, None)
                    self._own.pop(peer, None)
                else:
                    payload = encode(presence)
                    self._own.setdefault(peer, deque(maxlen=KEPT_OWN_WRITES)).append(payload)
                    revision = await self._store.put(peer, payload, expected=expected)
                    self._revisions[peer] = max(revision, self._revisions.get(peer, 0))
            except RevisionConflictError:
                self.num_conflicts += 1
            else:
                return True
            entry = await self._store.get(peer)
            expected = entry.revision if entry is not None else 0
            if entry is not None and self._stands(entry, presence):
                self._changed(entry)
                return False
        raise RevisionConflictError(f"the roster's entry {peer} was changed by others {MAX_CONFLICTS} times in a row")

    def _stands(self, entry: Entry, ours: Presence | None) -> bool:
        """Whether another guard's entry shall stay as it is."""
        theirs = self._read(entry)
        if theirs is None:
            return False
        if ours is None:
            return theirs.state in ("alive", "suspect")
        if theirs.card.session != ours.card.session:
            return not self._core.is_old_session(ours.peer, theirs.card.session)
        return theirs == ours

    def _changed(self, entry: Entry) -> None:
        if entry.value is None:
            if entry.revision >= self._revisions.get(entry.key, 0):
                self._revisions.pop(entry.key, None)
                self._own.pop(entry.key, None)
                self._core.observe_removal(entry.key)
            return
        if entry.revision < self._revisions.get(entry.key, 0):
            return
        self._revisions[entry.key] = entry.revision
        if entry.value in self._own.get(entry.key, ()):
            return
        presence = self._read(entry)
        if presence is None:  # no guard wrote this
            self.want([RosterChange(peer=entry.key, presence=self._core.get(entry.key))])
        elif not self._knows_better(presence):
            self._settle(entry.key)
            self._core.observe(presence)

    def _knows_better(self, theirs: Presence) -> bool:
        """Whether something waits to be written that is newer than another guard's entry."""
        if theirs.peer not in self._wanted:
            return False
        ours = self._wanted[theirs.peer]
        if ours is None:
            return theirs.state in ("dead", "left")
        if ours.card.session == theirs.card.session:
            return True
        return self._core.is_old_session(theirs.peer, theirs.card.session)

    def _settle(self, peer: str) -> None:
        """Nothing is wanted for a peer any more."""
        self._wanted.pop(peer, None)
        for future in self._written.pop(peer, []):
            if not future.done():
                future.set_result(None)

    def _read(self, entry: Entry) -> Presence | None:
        try:
            presence = decode(Presence, entry.value or b"")
        except ProtocolError as error:
            self.num_invalid += 1
            logger.warning("the roster's entry %s was passed over: %s", entry.key, error)
            return None
        if presence.peer != entry.key:
            self.num_invalid += 1
            return None
        return presence
