"""Holding the coordinator's lease, with a fencing token.

The lease is one key of the hub's `lease` store with a time to live. Taking it is a compare-and-set on "nobody holds
it"; the revision of that write is the *token*: revisions only grow, so a later holder always has a larger token.
Every plan and commit carries the token, and receivers ignore anything with a smaller token than the largest they
have seen: a holder that froze and came back cannot act on a lease that has passed on. Renewing is a compare-and-set
on our own last write.

A holder that the roster knows to be dead, or that lives in another session by now, is replaced at once, by a
compare-and-set on its own last write: a wrong word of the roster costs a change of holder and no more, since the old
holder's token is smaller.

A holder counts the lease as its own only until `ttl - margin` after it *sent* its last successful renewal, by its
own monotonic clock: the hub counts from when it arrived, which is later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from potluck import tasks
from potluck.clock import Clock
from potluck.errors import AccessError, PotluckError, ProtocolError, RetryableError, RevisionConflictError
from potluck.hub.connection import Entry, Store, Subscription
from potluck.messages import Message, decode, encode

logger = logging.getLogger(__name__)

KEY = "coordinator"
TTL_SECONDS = 3
RENEW_EVERY_SECONDS = 0.75
MARGIN_SECONDS = 0.5
WRITE_SECONDS = 1.0  # a write that takes longer counts as unanswered: waiting for it could cost us the lease
KEPT_TERMS = 16


class LeaseRecord(Message, frozen=True, kw_only=True):
    """What stands in the store while somebody holds the lease."""

    holder: str
    session: str = ""  # of the holder
    token: int = 0  # 0 in the first write of a term, whose own revision is the token


class LeaseView:
    """Who holds the lease and with which token, as seen from the store's changes (pure)."""

    def __init__(self) -> None:
        self.holder: str | None = None
        self.session = ""  # of the holder
        self.token = 0
        self.largest_token = 0
        self.revision = 0  # of what stands there now, readable or not; 0: nothing
        self.past_holders: dict[int, str] = {}  # by token: the last few terms

    def apply(self, entry: Entry) -> None:
        """Take in one change of the lease key."""
        self.revision = entry.revision if entry.value is not None else 0
        self.holder, self.session, self.token = None, "", 0
        if entry.value is None:
            return
        try:
            record = decode(LeaseRecord, entry.value)
        except ProtocolError:
            logger.warning("the lease holds something that is not a lease record; counted as free", exc_info=True)
            return
        self.holder, self.session = record.holder, record.session
        self.token = record.token or entry.revision
        self.largest_token = max(self.largest_token, self.token)
        self.past_holders[self.token] = record.holder
        while len(self.past_holders) > KEPT_TERMS:
            del self.past_holders[min(self.past_holders)]

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
        self._store = store
        self._self_id = self_id
        self._session = session
        self._clock = clock
        self._is_gone = is_gone or (lambda _holder, _session: False)
        self._on_change = on_change or (lambda: None)
        self._revision = 0  # of our last write, while we hold it
        self._token = 0
        self._valid_until = 0.0
        self._unanswered_since: float | None = None  # when we sent the first renewal after the last confirmed one
        self._wake = asyncio.Event()
        self._watch: Subscription | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_held(self) -> bool:
        """Whether this peer may act as the coordinator right now."""
        return self._token != 0 and self._clock.monotonic() < self._valid_until

    @property
    def token(self) -> int:
        """The fencing token of the present term; 0 when this peer does not hold the lease."""
        return self._token if self.is_held else 0

    async def start(self) -> None:
        """Follow the lease."""
        self._watch = await self._store.watch(self._changed)

    def stand(self) -> None:
        """Try for the lease from now on. Calling it twice does no harm."""
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
            try:
                async with asyncio.timeout(WRITE_SECONDS):
                    await self._renew() if self._token else await self._take()
            except RevisionConflictError:
                self._lose()
            except (RetryableError, TimeoutError) as error:
                logger.debug("the lease could not be written: %r", error)
            except AccessError as error:
                logger.warning("this peer may not coordinate (any more), so it stands down: %s", error)
                self._lose()
                return
            await self._pause()

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(RENEW_EVERY_SECONDS):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _take(self) -> None:
        view = self.view
        # When it is ourselves: an earlier life, or a write whose answer was lost.
        if view.holder not in (None, self._self_id) and not self._is_gone(view.holder, view.session):
            return
        sent = self._clock.monotonic()
        record = encode(LeaseRecord(holder=self._self_id, session=self._session))
        token = await self._store.put(KEY, record, expected=view.revision, ttl_seconds=TTL_SECONDS)
        self._revision = self._token = token
        self._valid_until = sent + TTL_SECONDS - MARGIN_SECONDS
        self._unanswered_since = None
        logger.info("took the coordinator's lease, token %d", self._token)
        self._on_change()

    async def _renew(self) -> None:
        if self._unanswered_since is None:
            self._unanswered_since = self._clock.monotonic()
        record = encode(LeaseRecord(holder=self._self_id, session=self._session, token=self._token))
        self._confirm(await self._store.put(KEY, record, expected=self._revision, ttl_seconds=TTL_SECONDS))

    def _confirm(self, revision: int) -> None:
        """A renewal of ours stands in the store. Each builds on the last confirmed one, so it may be the first sent."""
        if revision > self._revision and self._unanswered_since is not None:
            self._revision = revision
            self._valid_until = self._unanswered_since + TTL_SECONDS - MARGIN_SECONDS
            self._unanswered_since = None

    def _lose(self) -> None:
        if self._token:
            logger.info("lost the coordinator's lease, token %d", self._token)
            self._token = 0
            self._on_change()
