"""A session as one group of the run sees it: its members, its subjects, its stores, its beacons.

Rounds, states and progress live in a group and know nothing of others. They get this instead of the Session: the same
hub, clock and identity, but a roster of the group's members alone, subjects and keys of the group, and a beacon of the
group's own. For the group `main` subjects, keys and beacon are those of the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from potluck.clock import Clock
from potluck.errors import AccessError, DeadlineExceededError
from potluck.hub.connection import HubConnection, Store
from potluck.hub.groupstore import GroupStore
from potluck.hub.presence import Card, Presence
from potluck.hub.subjects import MAIN, Subjects
from potluck.peer.grouplease import GroupLease
from potluck.peer.identity import Identity
from potluck.peer.lease import Lease
from potluck.peer.roster import Roster, RosterEvent
from potluck.peer.session import HubChange, Session

STORE = "groups"  # where groups other than `main` keep what `main` has stores of its own for


class GroupSession:
    """One member's presence in one group."""

    def __init__(self, session: Session, group: str = MAIN) -> None:
        self.whole = session
        """The session with the run."""
        self.group = group
        self.subjects: Subjects = session.subjects.of_group(group)
        self.roster = Roster()
        """The present members of the group."""
        for presence in session.roster:
            self._take(presence)
        self._stop_listening = session.roster.listen(self._changed)

    @property
    def identity(self) -> Identity:
        """Who this peer is."""
        return self.whole.identity

    @property
    def peer_id(self) -> str:
        """By which the others know it."""
        return self.whole.peer_id

    @property
    def clock(self) -> Clock:
        """This process's clock."""
        return self.whole.clock

    @property
    def ended(self) -> asyncio.Future[None]:
        """Done when the session is over."""
        return self.whole.ended

    @property
    def hub(self) -> HubConnection:
        """The connection, once opened."""
        return self.whole.hub

    @property
    def card(self) -> Card:
        """What this peer says about itself now."""
        return self.whole.card

    def check_organiser(self, organiser: str) -> None:
        """ConfigurationError if a manifest is signed with another key than the run's organiser has."""
        self.whole.check_organiser(organiser)

    def now(self) -> float:
        """Hub time."""
        return self.whole.now()

    def listen(self, listener: Callable[[HubChange], None]) -> Callable[[], None]:
        """As `Session.listen`."""
        return self.whole.listen(listener)

    def store(self, name: str) -> Store:
        """The group's store of that name."""
        if self.group == MAIN:
            return self.hub.store(name)
        return GroupStore(self.hub.store(STORE), f"{self.subjects.key_prefix}{name}.")

    def lease(
        self,
        *,
        is_gone: Callable[[str, str], bool] | None = None,
        on_change: Callable[[], None] | None = None,
        may_hand_over: Callable[[], bool] = lambda: True,
    ) -> Lease:
        """This peer's lease of the group, to be started: that of `main` renews itself, others live by the heartbeat."""
        store, card = self.store("lease"), self.card
        if self.group == MAIN:
            return Lease(store, self.peer_id, self.clock, session=card.session, is_gone=is_gone, on_change=on_change)
        return GroupLease(
            store,
            self.peer_id,
            self.clock,
            group=self.group,
            heartbeat=self.whole.heartbeat,
            candidates=self.candidates,
            may_hand_over=may_hand_over,
            session=card.session,
            is_gone=is_gone,
            on_change=on_change,
        )

    def candidates(self) -> list[str]:
        """The members that may coordinate the group now."""
        return [presence.peer for presence in self.roster.alive() if presence.coordinates]

    def update_beacon(self, **changes: Any) -> None:
        """Change what the group's next beacons say."""
        self.whole.update_beacon(self.group, **changes)

    async def publish_beacon(self) -> None:
        """Say now what the group's next beacon would say. RetryableError while the hub is away."""
        await self.whole.publish_beacon(self.group)

    async def enter(self, timeout_seconds: float) -> None:
        """Be a member of the group, for the others too. AccessError if this peer may not."""
        if self.group not in self.card.groups:
            self.whole.update_card(groups=(*self.card.groups, self.group))
            await self.whole.card_accepted(timeout_seconds)
        if (reason := self.whole.refused_groups.get(self.group)) is not None:
            self.whole.update_card(groups=tuple(group for group in self.card.groups if group != self.group))
            raise AccessError(f"this peer may not be in the group {self.group!r} of run {self.subjects.run}: {reason}")
        await self._until_present(timeout_seconds)

    async def leave(self, timeout_seconds: float) -> None:
        """Be no member any more."""
        self.whole.end_beacons(self.group)
        if self.group in self.card.groups:
            self.whole.update_card(groups=tuple(group for group in self.card.groups if group != self.group))
            await self.whole.card_accepted(timeout_seconds)

    def close(self) -> None:
        """Follow the roster no more. Idempotent."""
        self._stop_listening()

    async def _until_present(self, timeout_seconds: float) -> None:
        """The hub tells the roster on another way than it answers: wait for our own entry in it."""
        entered = asyncio.Event()
        stop = self.roster.listen(lambda event: entered.set() if event.peer == self.peer_id else None)
        try:
            async with asyncio.timeout(timeout_seconds):
                while self.peer_id not in self.roster:
                    entered.clear()
                    await entered.wait()
        except TimeoutError:
            raise DeadlineExceededError(
                f"the hub does not show this peer in the group {self.group!r} within {timeout_seconds:g} s: try again"
            ) from None
        finally:
            stop()

    def _changed(self, event: RosterEvent) -> None:
        self._take(event.presence)

    def _take(self, presence: Presence) -> None:
        if self.group in presence.card.groups:
            self.roster.apply(presence)
        else:
            self.roster.forget(presence.peer)
