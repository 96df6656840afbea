"""Tells the run which states this peer keeps, and hears what others keep.

A keeper speaks when its shelf has changed, when somebody asks who keeps what, and every few seconds. It does so on its
own subject, where the hub lets nobody else publish; so what is heard there is its own word.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

from potluck import tasks
from potluck.errors import ProtocolError, RetryableError, StateUnavailableError
from potluck.hub.connection import Delivery, Subscription
from potluck.messages import decode, encode
from potluck.peer.groupsession import GroupSession
from potluck.peer.roster import RosterEvent
from potluck.round.lineage import Lineage
from potluck.state.announcement import (
    KEPT,
    MAX_KEPT,
    MAX_TROUBLE,
    WANTED,
    Announcements,
    Appraised,
    Claim,
    Kept,
    KeptState,
    Verdict,
    describe_claims,
    judge,
)
from potluck.state.shelf import Shelf

logger = logging.getLogger(__name__)

SPEAK_EVERY_SECONDS = 5.0
SPEAK_PAUSE_SECONDS = 0.25  # between two announcements, however many ask
ASK_EVERY_SECONDS = 2.0
APPRAISED_SECONDS = 30.0  # how long a comparison by value holds; those who took part hold their states as long


class StateDirectory:
    """One peer's announcements, and its view of everybody's."""

    def __init__(
        self,
        session: GroupSession,
        shelf: Shelf,
        holders: Callable[[int], tuple[str, ...]],
        past: Callable[[], Iterable[KeptState]] = tuple,
        saved: Callable[[], tuple[KeptState, ...]] = tuple,
    ) -> None:
        """`holders` tells who has the averages of an epoch, by its commit.

        `past` tells which states this peer had before, `saved` which it has on disk.
        """
        self.announcements = Announcements()
        self.counts: Counter[str] = Counter()
        self.on_asked: Callable[[str], None] = lambda _peer: None
        """Is told who asks."""
        self.beginner = ""
        """The peer that this one, as the coordinator, has chosen to begin the run …"""
        self.begins_at = 0
        """… when it is at this epoch."""
        self.cut = 0
        """For which cut this peer, as the coordinator, wants keepers to hold a state …"""
        self.cut_epoch = 0
        """… of this epoch."""
        self.settle: Callable[[int | None, int], Awaitable[bool]] = _settles_nothing
        """Compares values where digests decide nothing, of one epoch or of any from one on; whether that helped."""
        self.trouble = ""
        """What the organisers should know."""
        self._appraised: dict[int, tuple[float, Appraised]] = {}
        self._liars: set[str] = set()
        self._session = session
        self._shelf = shelf
        self.holders = holders
        self._past = past
        self._saved = saved
        self._speak = asyncio.Event()
        self._changed = asyncio.Event()  # set, and replaced by another, when somebody has spoken or gone
        self._listeners: list[Callable[[], None]] = []
        self._subscriptions: list[Subscription] = []
        self._stop_listening: Callable[[], None] = lambda: None
        self._task: asyncio.Task[None] | None = None
        self._has_spoken = False
        self._is_leaving = False
        self._failures: Counter[str] = Counter()  # by peer: how often it did not give what it announced

    async def start(self) -> None:
        """Listen, and speak when there is something to say."""
        session = self._session
        self._stop_listening = session.roster.listen(self._roster_changed)
        for topic, handler in ((KEPT, self._heard), (WANTED, self._asked)):
            self._subscriptions.append(await session.hub.subscribe(session.subjects.news("*", topic), handler))
        self._task = asyncio.create_task(self._keep_speaking(), name="state: announcements")

    async def close(self) -> None:
        """Say that nothing is kept here any more, and be silent. Idempotent."""
        self._stop_listening()
        await tasks.end(self._task)
        for subscription in self._subscriptions:
            await subscription.cancel()
        self._subscriptions = []
        task, self._task = self._task, None
        if task is not None and not self._session.ended.done():
            await self._publish(KEPT, encode(Kept(session=self._session.card.session)))

    def announce(self) -> None:
        """The shelf has changed: say so soon. We ourselves know it at once."""
        self.announcements.take(self._session.peer_id, self._kept())
        self._speak.set()

    def part(self) -> None:
        """Say that this peer is about to leave, so that others take over what it alone has."""
        self._is_leaving = True
        self.announce()

    async def ask(self) -> None:
        """Have everybody say what they keep."""
        await self._publish(WANTED, b"")

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` when somebody has spoken or gone; the returned function ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    async def until_changed(self, seconds: float) -> None:
        """Until somebody has spoken or gone, or so long."""
        changed = self._changed
        try:
            async with asyncio.timeout(seconds):
                await changed.wait()
        except TimeoutError:
            pass

    # What is known

    def claims(self, epoch: int, *, backups: bool = False) -> list[Claim]:
        """What is said about an epoch."""
        found = self.announcements.claims(epoch, self._session.roster, self.holders(epoch), backups=backups)
        found = [claim for claim in found if claim.peer not in self._liars]
        appraised = None if backups else self._appraisal(epoch)
        return appraised.applied(found) if appraised is not None else found

    def verdict(self, epoch: int, *, backups: bool = False) -> Verdict | None:
        """The state of an epoch, if it can be told."""
        by_value = not backups and self._appraisal(epoch) is not None
        return judge(epoch, self.claims(epoch, backups=backups), self._failures, by_value=by_value)

    def disputed(self, up_to: int, *, at_least: int = 0, epoch: int | None = None) -> int | None:
        """The newest epoch in that range, or this one, of which several states are served, and none can be believed."""
        epochs = self.announcements.epochs(self._session.roster) if epoch is None else [epoch]
        for each in epochs:
            served = {c.state.compared for c in self.claims(each) if c.state is not None and c.state.is_served}
            if (epoch is not None or at_least <= each <= up_to) and len(served) > 1 and self.verdict(each) is None:
                return each
        return None

    def offered(self, up_to: int, *, at_least: int = 0) -> tuple[int, list[str]] | None:
        """The newest epoch in that range whose state anybody serves, believed or not, and who does."""
        for epoch in self.announcements.epochs(self._session.roster):
            if at_least <= epoch <= up_to:
                claims = self.claims(epoch)
                return epoch, [c.peer for c in claims if c.state is not None and c.state.is_served]
        return None

    def take_appraisal(self, appraised: Appraised) -> None:
        """States of an epoch were compared by value."""
        now = self._session.clock.monotonic()
        self._appraised = {epoch: each for epoch, each in self._appraised.items() if now < each[0] + APPRAISED_SECONDS}
        self._appraised[appraised.epoch] = (now, appraised)

    def _appraisal(self, epoch: int) -> Appraised | None:
        at, appraised = self._appraised.get(epoch, (0.0, None))
        return appraised if self._session.clock.monotonic() < at + APPRAISED_SECONDS else None

    def distrust(self, peer: str) -> None:
        """It answered for another state than it serves: nothing that it says counts, until it is started anew."""
        self._liars.add(peer)

    def tell_trouble(self, text: str) -> bool:
        """What the organisers should know, empty: nothing; whether that is new."""
        if text == self.trouble:
            return False
        is_first = bool(text) and not self.trouble
        self.trouble = text[:MAX_TROUBLE]
        self.announce()
        return is_first

    def note_failure(self, verdict: Verdict) -> bool:
        """Who announces this state does not give it, or it is another: ask somebody else first, if there is one."""
        self._failures.update(self.keepers(verdict.epoch, verdict.digest))
        return any(not self._failures[peer] for peer in verdict.keepers)

    def newest(
        self, up_to: int | None = None, *, at_least: int = 0, backups: bool = False, is_settled: bool = False
    ) -> Verdict | None:
        """The newest state that can be believed, of an epoch in that range; only a settled one if so wished."""
        epochs = set(self.announcements.epochs(self._session.roster, backups=backups))
        for epoch in sorted(epochs if backups else epochs | self._appraised.keys(), reverse=True):
            if at_least <= epoch and (up_to is None or epoch <= up_to):
                verdict = self.verdict(epoch, backups=backups)
                if verdict is not None and (verdict.is_settled or not is_settled):
                    return verdict
        return None

    def keepers(self, epoch: int, digest: str) -> list[str]:
        """Who else serves a state, from memory or from a backup; with a common digest, one that is compared by it."""
        claims = [*self.claims(epoch), *self.claims(epoch, backups=True)]
        serving = [
            claim.peer
            for claim in claims
            if claim.state is not None
            and claim.state.is_served
            and digest in (claim.state.digest, claim.state.compared)
        ]
        return [peer for peer in dict.fromkeys(serving) if peer != self._session.peer_id]

    async def until_verdict(
        self, epoch: int | None, lineage: Lineage, until: float, *, at_least: int = 0, settle_seconds: float = 0.0
    ) -> Verdict:
        """The state of an epoch, or the newest that the run has, once it can be told and somebody has it.

        For `settle_seconds` only a settled verdict will do.
        """
        clock = self._session.clock
        settle_until = clock.monotonic() + settle_seconds
        while True:
            must_settle = clock.monotonic() < settle_until
            if epoch is not None:
                verdict = self.verdict(epoch)
            else:
                verdict = self.newest(lineage.epoch, at_least=at_least, is_settled=must_settle)
            if verdict is not None and self._is_to_be_had(verdict):
                return verdict
            if clock.monotonic() < until and await self.settle(epoch, at_least):
                await self.until_changed(SPEAK_PAUSE_SECONDS)  # for the lineage to tell of that epoch too
                continue
            left = until - clock.monotonic()
            if left <= 0:
                wanted = epoch if epoch is not None else max(lineage.epoch, at_least)
                raise StateUnavailableError(
                    f"no state of epoch {wanted} can be had: announced is {describe_claims(self.claims(wanted))}. "
                    "Wait for a keeper (an aux peer, or a trainer that is up to date), or have an organiser trust one "
                    "of those who disagree"
                )
            await self.ask()
            if must_settle:
                left = min(left, settle_until - clock.monotonic())
            await self.until_changed(min(max(left, 0.0), ASK_EVERY_SECONDS))

    def has_newer(self, verdict: Verdict, lineage: Lineage) -> bool:
        """Whether a state of a later epoch is available."""
        newer = self.newest(lineage.epoch, at_least=verdict.epoch + 1)
        return newer is not None and self._is_to_be_had(newer)

    def _is_to_be_had(self, verdict: Verdict) -> bool:
        return bool(self.keepers(verdict.epoch, verdict.digest)) or self._shelf.find(verdict.digest) is not None

    # What happens

    def _heard(self, delivery: Delivery) -> None:
        peer = _speaker(delivery)
        try:
            self.announcements.take(peer, decode(Kept, delivery.payload))
        except ProtocolError as error:
            self.counts["bad_announcements"] += 1
            logger.debug("what %s says to keep cannot be read: %s", peer, error)
            return
        self._tell()

    def _asked(self, delivery: Delivery) -> None:
        self.on_asked(_speaker(delivery))
        if self._kept().says_anything:
            self._speak.set()

    def _roster_changed(self, event: RosterEvent) -> None:
        if event.change in ("dead", "left"):
            self.announcements.forget(event.peer)
            self._failures.pop(event.peer, None)
            self._liars.discard(event.peer)
        self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        for listener in list(self._listeners):
            listener()

    async def _keep_speaking(self) -> None:
        while True:
            self._speak.clear()
            kept = self._kept()
            if kept.says_anything or self._has_spoken:
                self._has_spoken = kept.says_anything
                await self._publish(KEPT, encode(kept))
                self.counts["announcements"] += 1
            try:
                async with asyncio.timeout(SPEAK_EVERY_SECONDS if kept.says_anything else None):
                    await self._speak.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(SPEAK_PAUSE_SECONDS)

    def _kept(self) -> Kept:
        held = tuple(held.announced() for held in self._shelf)
        epochs = {state.epoch for state in held if not state.is_backup}
        past = tuple(state for state in self._past() if held and state.epoch not in epochs)
        states = (*past, *held)[-MAX_KEPT:]
        return Kept(
            session=self._session.card.session,
            states=states,
            saved=self._saved(),
            leaving=self._is_leaving,
            beginner=self.beginner,
            begins_at=self.begins_at,
            trouble=self.trouble,
            cut=self.cut,
            cut_epoch=self.cut_epoch,
        )

    async def _publish(self, topic: str, payload: bytes) -> None:
        session = self._session
        try:
            await session.hub.publish(session.subjects.news(session.peer_id, topic), payload)
        except RetryableError as error:  # said again in a few seconds
            self.counts["unsaid"] += 1
            logger.debug("%s could not be told: %s", topic, error)


async def _settles_nothing(epoch: int | None, at_least: int) -> bool:
    return False


def _speaker(delivery: Delivery) -> str:
    return delivery.subject.rsplit(".", 2)[-2]
