"""The lease of a group other than `main`: written once in a term, kept alive by its holder's heartbeat.

It is taken and fenced as the lease of `main` is (lease.py). What differs: it is not renewed itself (heartbeat.py), and
candidates have an order, so that the groups of a run are spread over those who may coordinate. The order is by a hash
of group and peer (rendezvous hashing): it is the same for all who look, differs from group to group, and when a holder
is gone its groups go to several others. The first in the order takes a free group at once, each next one a little
later. A holder that is not the first for `SETTLED_SECONDS` hands the group over between two rounds.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable
from functools import lru_cache

from potluck.clock import Clock
from potluck.errors import PotluckError, RevisionConflictError
from potluck.hub.connection import Store
from potluck.hub.leaserecord import KEY, LeaseRecord
from potluck.messages import encode
from potluck.peer.heartbeat import Heartbeat
from potluck.peer.lease import (
    GRACE_SECONDS,
    RENEW_EVERY_SECONDS,
    SILENT_SECONDS,
    TRY_AGAIN_SECONDS,
    TRY_STORE_AFTER_SECONDS,
    Lease,
)

logger = logging.getLogger(__name__)

STEP_SECONDS = 0.3  # by which each next candidate lets the one before go first
MOST_STEPS = 5
SETTLED_SECONDS = 5.0  # for which another must have been the first before a holder makes way


@lru_cache(maxsize=65536)
def _score(group: str, peer: str) -> bytes:
    return hashlib.sha256(f"{group}\0{peer}".encode()).digest()


def in_order(group: str, candidates: Iterable[str]) -> list[str]:
    """Who should coordinate a group, the first choice first (pure)."""
    return sorted(candidates, key=lambda peer: _score(group, peer))


class GroupLease(Lease):
    """One candidate for the lease of one group."""

    def __init__(
        self,
        store: Store,
        self_id: str,
        clock: Clock,
        *,
        group: str,
        heartbeat: Heartbeat,
        candidates: Callable[[], Iterable[str]],
        may_hand_over: Callable[[], bool],
        session: str = "",
        is_gone: Callable[[str, str], bool] | None = None,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        """`candidates` are who may coordinate the group now; `may_hand_over` tells whether no round is under way."""
        super().__init__(store, self_id, clock, session=session, is_gone=is_gone, on_change=on_change)
        self._group = group
        self._heartbeat = heartbeat
        self._candidates = candidates
        self._may_hand_over = may_hand_over
        self._free_since: float | None = None
        self._outranked_since: float | None = None
        self._is_started = False

    async def start(self) -> None:
        """Follow the lease, and the heartbeats."""
        await self._heartbeat.start()
        self._is_started = True
        await super().start()

    async def close(self) -> None:
        """Stop, and hand the lease back if it is ours."""
        await super().close()
        self._heartbeat.drop(self)
        if self._is_started:
            self._is_started = False
            await self._heartbeat.close()

    # By the heartbeat

    def beaten(self, sent: float) -> None:
        """See HeldLease."""
        self._hold_from(sent)

    def extended(self) -> None:
        """See HeldLease."""
        self._extend()

    def ended(self) -> None:
        """See HeldLease."""
        self._lose()
        self._wake.set()

    # As a candidate

    async def _try_to_take(self) -> float:
        holder = self.view.holder
        if holder in (None, self._self_id) or await self._is_ended(str(holder)):
            return await self._take_in_turn()
        seen = self._heartbeat.seen(str(holder))
        silent_seconds = self.clock.monotonic() - seen.at if seen is not None else 0.0
        if silent_seconds < TRY_STORE_AFTER_SECONDS:
            self._free_since = None
            return min(RENEW_EVERY_SECONDS, TRY_STORE_AFTER_SECONDS - silent_seconds)
        await self._heartbeat.try_store()
        self._note_leader(True)
        if silent_seconds >= SILENT_SECONDS and self.clock.monotonic() >= self._leader_since + GRACE_SECONDS:
            logger.info("%s is silent for %.1f s and loses group %s", holder, silent_seconds, self._group)
            return await self._take_in_turn()
        return TRY_AGAIN_SECONDS

    async def _is_ended(self, holder: str) -> bool:
        """Whether the holder is gone, or was ended: changes of two keys come in any order, so the store is asked."""
        if self._is_gone(holder, self.view.session):
            return True
        seen = self._heartbeat.seen(holder) or await self._heartbeat.look(holder)
        return seen is None or seen.session != self.view.session

    async def _take_in_turn(self) -> float:
        """Take it as soon as it is our turn; in how many seconds to look again."""
        now = self.clock.monotonic()
        if self._free_since is None:
            self._free_since = now
        order = in_order(self._group, {*self._candidates(), self._self_id} - {self.view.holder or ""})
        place = order.index(self._self_id) if self._self_id in order else 0
        wait_seconds = self._free_since + min(place, MOST_STEPS) * STEP_SECONDS - now
        if wait_seconds > 0:
            return wait_seconds
        await self._take()
        return RENEW_EVERY_SECONDS if self._token else TRY_AGAIN_SECONDS

    async def _take(self) -> None:
        holder = self.view.holder
        if holder not in (None, self._self_id) and not await self._heartbeat.end(str(holder)):
            return  # it lives
        sent = await self._heartbeat.ensure()
        record = encode(LeaseRecord(holder=self._self_id, session=self._session))
        try:
            token = await self._store.put(KEY, record, expected=self.view.revision)
        except RevisionConflictError:
            await self._look()
            return
        self._revision = self._token = token
        self.view.newest_revision = max(self.view.newest_revision, token)
        self._hold_from(sent)
        self._heartbeat.hold(self)
        self._free_since = self._outranked_since = None
        logger.info("took the lease of group %s, token %d", self._group, self._token)
        self._on_change()

    # As the holder

    async def _renew(self) -> float:
        """The heartbeat renews it. Here the holder looks whether somebody else should have the group."""
        now = self.clock.monotonic()
        first = in_order(self._group, {*self._candidates(), self._self_id})[0]
        if first == self._self_id:
            self._outranked_since = None
        elif self._outranked_since is None:
            self._outranked_since = now
        elif now - self._outranked_since >= SETTLED_SECONDS and self.is_held and self._may_hand_over():
            await self._hand_over(first)
        return RENEW_EVERY_SECONDS

    async def _hand_over(self, first: str) -> None:
        logger.info("group %s goes to %s, whose turn it is", self._group, first)
        token, self._outranked_since = self._token, None
        self._lose()
        self._free_since = self.clock.monotonic()  # from now on we are a candidate like any other
        try:
            await self._store.delete(KEY, expected=token)
        except PotluckError as error:
            logger.info("the lease of group %s could not be handed over: %s", self._group, error)

    def _lose(self) -> None:
        self._heartbeat.drop(self)
        super()._lose()
