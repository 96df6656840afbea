"""Holding the coordinator's lease, with a fencing token.

The lease is one key of the hub's `lease` store. Taking it is a compare-and-set; the revision of that write is the
*token*: revisions only grow, so a later holder always has a larger token. Every plan and commit carries the token, and
receivers ignore anything with a smaller token than the largest they have seen: a holder that froze and came back cannot
act on a lease that has passed on. Renewing is a compare-and-set on our own last write.

Who may be replaced:

*The dead.* A holder that the roster knows to be dead, or that lives in another session by now, is replaced at once, by
a compare-and-set on its own last write: a wrong word of the roster costs a change of holder and no more, since the old
holder's token is smaller.

*The silent.* A holder that does not renew for `SILENT_SECONDS` is replaced in the same way. It counts the lease as its
own for a little less than that after it *sent* its last successful renewal, by its own monotonic clock.

*Not those who cannot renew.* When the server that leads the store dies, its cluster has no leader for 4 to 9 seconds
(a constant of nats-server), and nobody can write. That is no fault of the holder, and nobody could replace it: so it
goes on for as long as the hub says that nobody keeps the store. The others notice the same, since they try the store
while the holder is silent, by a compare-and-set that cannot succeed; once there is a leader, they leave the holder time
to renew first. If our server is cut off from the others, and they replace us, our token is smaller: we can delay those
who are cut off with us, and nobody else.

The store's own time to live is for a run that nobody coordinates any more; it is longer than any election.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from potluck import tasks
from potluck.clock import Clock
from potluck.errors import (
    AccessError,
    NobodyAnswersError,
    PotluckError,
    ProtocolError,
    RetryableError,
    RevisionConflictError,
)
from potluck.hub.connection import Entry, Store, Subscription
from potluck.hub.leaserecord import KEY, LeaseRecord
from potluck.messages import decode, encode

logger = logging.getLogger(__name__)

SILENT_SECONDS = 3.0
MARGIN_SECONDS = 0.5
RENEW_EVERY_SECONDS = 0.75
TRY_STORE_AFTER_SECONDS = 1.5  # two renewals are missing: from now on we look whether the store has a leader
TRY_AGAIN_SECONDS = 0.1  # while it has none, and while we are about to replace somebody
GRACE_SECONDS = 1.5  # for the holder, once the store has a leader again
EXTENSION_SECONDS = 1.0  # of a holder's time, by each word of the hub that nobody keeps the store
TTL_SECONDS = 20
WRITE_SECONDS = 1.0  # a write that takes longer counts as unanswered: waiting for it could cost us the lease
IMPOSSIBLE_REVISION = 1 << 53
KEPT_TERMS = 16


class LeaseView:
    """Who holds the lease and with which token, as seen from the store's changes (pure)."""

    def __init__(self) -> None:
        self.holder: str | None = None
        self.session = ""  # of the holder
        self.token = 0
        self.largest_token = 0
        self.revision = 0  # of what stands there now, readable or not; 0: nothing
        self.newest_revision = 0  # of anything that stood there: no token that was given out until then is larger
        self.past_holders: dict[int, str] = {}  # by token: the last few terms
        self._told: dict[int, tuple[int, int]] = {}  # by token: the first and the last revision that we were told of

    def apply(self, entry: Entry) -> None:
        """Take in one change of the lease key."""
        self.revision = entry.revision if entry.value is not None else 0
        self.newest_revision = max(self.newest_revision, entry.revision)
        self.holder, self.session, self.token = None, "", 0
        if entry.value is None:
            return
        try:
            record = decode(LeaseRecord, entry.value)
            self.token = self._check_token(record, entry.revision)
        except ProtocolError:
            logger.warning("the lease holds something that is not a lease record; counted as free", exc_info=True)
            return
        self.holder, self.session = record.holder, record.session
        self.largest_token = max(self.largest_token, self.token)
        self.past_holders[self.token] = record.holder
        self._told[self.token] = (self._told.get(self.token, (entry.revision,))[0], entry.revision)
        while len(self.past_holders) > KEPT_TERMS:
            oldest = min(self.past_holders)
            del self.past_holders[oldest], self._told[oldest]

    def _check_token(self, record: LeaseRecord, revision: int) -> int:
        """The token of a record. One that is made up would shut out all who come after it, or take another's place."""
        token = record.token or revision
        if not 0 < token <= revision:
            raise ProtocolError(f"{record.holder} claims token {token}, and the store has come to {revision} only")
        if self.past_holders.get(token, record.holder) != record.holder:
            raise ProtocolError(f"{record.holder} claims token {token}, which was given to {self.past_holders[token]}")
        return token

    def was_held(self, peer: str, token: int) -> bool | None:
        """Whether a peer had the lease with this token; None where that is not known, or not yet."""
        if token in self.past_holders:
            return self.past_holders[token] == peer
        if any(first < token <= last for first, last in self._told.values()):
            return False  # that revision was a renewal: each is a compare-and-set on the one before
        return None

    def accepts(self, sender: str, token: int) -> bool:
        """Whether a plan or commit with this sender and token comes from the holder of the newest lease."""
        return sender == self.holder and token == self.token and token >= self.largest_token


class Lease:
    """One candidate for the lease: takes it when it is free, renews it while it holds it."""

    def __init__(
        self,
        store: Store,
        self_id: str,
        clock: Clock,
        *,
        session: str = "",
        is_gone: Callable[[str, str], bool] | None = None,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        """`is_gone` tells whether a peer no longer lives in a session; `stand` makes this peer a candidate."""
        self.view = LeaseView()
        self.proven_at = -math.inf
        """When we sent the newest write that succeeded: at that time nobody had taken the lease after us."""
        self._store = store
        self._self_id = self_id
        self._session = session
        self.clock = clock
        self._is_gone = is_gone or (lambda _holder, _session: False)
        self._on_change = on_change or (lambda: None)
        self._revision = 0  # of our last write, while we hold it
        self._token = 0
        self._valid_until = 0.0
        self._expires_at = 0.0  # at the hub, at the earliest
        self._unanswered_since: float | None = None  # when we sent the first renewal after the last confirmed one
        self._renewal_seen_at = 0.0  # when the store last told anything about the lease
        self._leader_since = -math.inf  # since when the store has a leader, as far as we know
        self._has_leader = True
        self._wake = asyncio.Event()
        self._watch: Subscription | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_held(self) -> bool:
        """Whether this peer may act as the coordinator right now."""
        return self._token != 0 and self.clock.monotonic() < self._valid_until

    @property
    def token(self) -> int:
        """The fencing token of the present term; 0 when this peer does not hold the lease."""
        return self._token if self.is_held else 0

    async def start(self) -> None:
        """Follow the lease."""
        self._watch = await self._store.watch(self._changed)

    def stand(self) -> None:
        """Try for the lease from now on. Idempotent."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="lease")

    def reconsider(self) -> None:
        """Somebody died: look at once whether it was the holder."""
        self._wake.set()

    async def close(self) -> None:
        """Stop, and hand the lease back if it is ours, so that the next holder need not wait."""
        await tasks.end(self._task)
        self._task = None
        if self._watch is not None:
            await self._watch.cancel()
            self._watch = None
        if self.is_held:
            try:
                await self._store.delete(KEY, expected=self._revision)
            except PotluckError as error:
                logger.info("the lease could not be handed back (%s); it ends by itself in %s s", error, TTL_SECONDS)
            self._lose()

    def _changed(self, entry: Entry) -> None:
        if entry.key != KEY:
            return
        self._renewal_seen_at = self.clock.monotonic()
        self._note_leader(True)
        before = (self.view.holder, self.view.token)
        self.view.apply(entry)
        if self._token and self.view.token == self._token:
            self._confirm(entry.revision)  # a renewal whose answer was lost still counts
        elif self._token and entry.revision > self._revision:
            self._lose()  # somebody else has it, or it was removed
        if self.view.holder is None:
            self._wake.set()
        if (self.view.holder, self.view.token) != before:
            self._on_change()

    async def _run(self) -> None:
        while True:
            self._wake.clear()  # before looking, so that no word that comes meanwhile is lost
            pause_seconds = RENEW_EVERY_SECONDS
            try:
                async with asyncio.timeout(WRITE_SECONDS):
                    pause_seconds = await (self._renew() if self._token else self._try_to_take())
            except NobodyAnswersError as error:
                logger.debug("the lease has no leader to write it: %s", error)
                self._note_leader(False)
                self._extend()
                pause_seconds = TRY_AGAIN_SECONDS
            except (RetryableError, TimeoutError) as error:
                logger.debug("the lease could not be written: %r", error)
                pause_seconds = TRY_AGAIN_SECONDS
            except AccessError as error:
                logger.warning("this peer may not coordinate (any more), so it stands down: %s", error)
                self._lose()
                return
            await self._pause(pause_seconds)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass

    # As a candidate

    async def _try_to_take(self) -> float:
        """Take it if it is free or its holder is lost; in how many seconds to look again."""
        view = self.view
        # When it is ourselves: an earlier life, or a write whose answer was lost.
        if view.holder in (None, self._self_id) or self._is_gone(view.holder, view.session):
            await self._take()
            return RENEW_EVERY_SECONDS if self._token else TRY_AGAIN_SECONDS
        silent_seconds = self.clock.monotonic() - self._renewal_seen_at
        if silent_seconds < TRY_STORE_AFTER_SECONDS:
            return min(RENEW_EVERY_SECONDS, TRY_STORE_AFTER_SECONDS - silent_seconds)
        await self._try_store()
        if silent_seconds >= SILENT_SECONDS and self.clock.monotonic() >= self._leader_since + GRACE_SECONDS:
            logger.info("%s is silent for %.1f s and loses the coordinator's lease", view.holder, silent_seconds)
            await self._take()
        return TRY_AGAIN_SECONDS

    async def _try_store(self) -> None:
        """Find out whether the store has a leader, without writing: NobodyAnswersError when it has none."""
        try:
            await self._store.put(KEY, b"", expected=IMPOSSIBLE_REVISION)
        except RevisionConflictError:
            self._note_leader(True)

    async def _take(self) -> None:
        sent = self.clock.monotonic()
        record = encode(LeaseRecord(holder=self._self_id, session=self._session))
        try:
            token = await self._store.put(KEY, record, expected=self.view.revision, ttl_seconds=TTL_SECONDS)
        except RevisionConflictError:
            await self._look()  # the holder renews, or somebody was faster, and we have not heard of it
            return
        self._revision = self._token = token
        self.view.newest_revision = max(self.view.newest_revision, token)
        self._hold_from(sent)
        self._unanswered_since = None
        logger.info("took the coordinator's lease, token %d", self._token)
        self._on_change()

    # As the holder

    async def _renew(self) -> float:
        sent = self.clock.monotonic()
        if self._unanswered_since is None:
            self._unanswered_since = sent
        record = encode(LeaseRecord(holder=self._self_id, session=self._session, token=self._token))
        try:
            revision = await self._store.put(KEY, record, expected=self._revision, ttl_seconds=TTL_SECONDS)
        except RevisionConflictError:
            if await self._look():  # else a renewal of ours arrived, whose answer and change were lost
                self._lose()
        else:
            self._revision = revision
            self._hold_from(sent)
            self._unanswered_since = None
        return RENEW_EVERY_SECONDS

    def _confirm(self, revision: int) -> None:
        """A change tells of a renewal of ours. Each builds on the last confirmed one, so it may be the first sent."""
        if revision > self._revision and self._unanswered_since is not None:
            self._revision = revision
            self._hold_from(self._unanswered_since)
            self._unanswered_since = None

    def _hold_from(self, sent: float) -> None:
        self.proven_at = sent
        self._valid_until = sent + SILENT_SECONDS - MARGIN_SECONDS
        self._expires_at = sent + TTL_SECONDS - MARGIN_SECONDS

    def _extend(self) -> None:
        """Nobody can write the lease now, so nobody can take it from us: it is ours a little longer, if it still is."""
        if self.is_held:
            self._valid_until = max(
                self._valid_until, min(self.clock.monotonic() + EXTENSION_SECONDS, self._expires_at)
            )

    def _lose(self) -> None:
        if self._token:
            logger.info("lost the coordinator's lease, token %d", self._token)
            self._token = 0
            self._on_change()

    # Both

    async def _look(self) -> bool:
        """Read the lease as it stands, since a change may not have been told; whether it is somebody else's."""
        entry = await self._store.get(KEY)
        if entry is None or entry.revision > self.view.revision:
            self._changed(entry or Entry(key=KEY, value=None, revision=self.view.revision + 1, written_at=0.0))
            self._wake.clear()  # this is no news to the caller
        return self._token == 0 or self.view.token != self._token

    def _note_leader(self, has_leader: bool) -> None:
        if has_leader and not self._has_leader:
            self._leader_since = self.clock.monotonic()
        self._has_leader = has_leader
