"""What the coordinator of `main` does for cuts (run/cuts.py): wants them, makes them, declares them safe.

A run with several groups gets a cut every `every_seconds`, if something has moved since the last one; a run that had
several once goes on having cuts, since a group goes back to its newest one. Programs may ask for one at any time. One
cut is made at a time, and the next is not begun before this one is safe or has been waited for long enough. A group
that does not answer within `ANSWER_SECONDS`, since nobody coordinates it or nobody has its state, is left out and
named.

Whatever ends this coordinator's term ends its cut: the next coordinator begins another, with a new number.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping

from potluck import tasks
from potluck.errors import RetryableError, RevisionConflictError
from potluck.hub.connection import Subscription
from potluck.link.dispatch import Incoming
from potluck.link.grouplinks import GroupLinks
from potluck.peer.groupsession import GroupSession
from potluck.peer.lease import Lease
from potluck.run.cutboard import (
    AskForCut,
    Cut,
    CutNumber,
    CutPart,
    PartRecord,
    ReturnOrder,
    WantedCut,
    board_of,
)

logger = logging.getLogger(__name__)

LOOK_EVERY_SECONDS = 1.0
ANSWER_SECONDS = 30.0  # for a group to name its part
SAVE_SECONDS = 900.0  # for all parts to be on trusted disks, unless a line moves for longer
ASKED_SECONDS = 20.0  # the same, once a program has asked for the next one
NEXT_SECONDS = 2.0  # between two cuts, however many ask
MOST_CUTS = 64  # that the hub remembers


class CutDesk:
    """Makes cuts while this peer coordinates main. Lives on the event loop."""

    def __init__(self, session: GroupSession, links: GroupLinks, lease: Lease, every_seconds: float) -> None:
        """`every_seconds` between two cuts; 0: only when a program asks."""
        self.counts: Counter[str] = Counter()
        self.board = board_of(session.whole)
        self._session = session
        self._lease = lease
        self._every_seconds = every_seconds
        self._parts: dict[str, PartRecord] = {}
        self._asked: dict[str, int] | None = None  # what a program wants to be in the next one
        self._asking: list[asyncio.Future[CutNumber]] = []
        self._last_at: float | None = None
        self._left_out: frozenset[str] = frozenset()
        self._wake = asyncio.Event()
        self._watch: Subscription | None = None
        self._task: asyncio.Task[None] | None = None
        links.handle(AskForCut, self._take_question)

    async def start(self) -> None:
        """Make cuts from now on."""
        await self.board.start()
        self._task = asyncio.create_task(self._run(), name="cuts: desk")

    async def close(self) -> None:
        """Make none any more. Idempotent."""
        task, self._task = self._task, None
        await tasks.end(task)
        watch, self._watch = self._watch, None
        if watch is not None:
            await watch.cancel()
        for asking in self._asking:
            asking.cancel()
        if task is not None:
            await self.board.close()

    # By programs

    async def _take_question(self, incoming: Incoming[AskForCut]) -> CutNumber:
        question = incoming.message
        incoming.release()
        if not self._lease.is_held:
            raise RetryableError("this peer does not coordinate main (any more): ask the peer that does")
        if question.return_to:
            return await self._take_order(incoming.sender, question.return_to)
        unknown = sorted(question.epochs.keys() - self._groups())
        if unknown:
            there = ", ".join(sorted(self._groups()))
            return CutNumber(trouble=f"the run has no group {unknown[0]!r} now: there are {there}")
        if self._asked is not None and any(
            self._asked.get(group, epoch) != epoch for group, epoch in question.epochs.items()
        ):
            return CutNumber(trouble="a cut of other epochs is waiting to be made: ask again when it is")
        self._asked = {**(self._asked or {}), **question.epochs}
        answer: asyncio.Future[CutNumber] = asyncio.get_running_loop().create_future()
        self._asking.append(answer)
        self._wake.set()
        return await answer

    async def _take_order(self, sender: str, number: int) -> CutNumber:
        presence = self._session.whole.roster.get(sender)
        if presence is None or not (presence.trusted or presence.coordinates):
            return CutNumber(trouble="only peers that are trusted or may coordinate can have the run go back to a cut")
        return await self.order_return(number)

    async def order_return(self, number: int, *, of_manifest: int = 0) -> CutNumber:
        """Have all groups of a cut go back to it; once for each order of a manifest."""
        last = self.board.returning
        if last is not None and of_manifest and last.of_manifest == of_manifest:
            return CutNumber(number=last.number, order=last.order)
        if number not in self.board.made:
            there = ", ".join(map(str, sorted(self.board.made))) or "none"
            return CutNumber(trouble=f"there is no cut {number} any more: there are {there}")
        order = ReturnOrder(order=(last.order if last is not None else 0) + 1, number=number, of_manifest=of_manifest)
        await self.board.order_return(order)
        logger.warning("all groups go back to %s", self.board.made[number].describe())
        return CutNumber(number=number, order=order.order)

    # Making them

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                if self._lease.is_held and self._watch is None:
                    self._watch = await self.board.watch_parts(self._took_part)
                if self._lease.is_held and self._is_due():
                    await self._make()
                elif not self._lease.is_held and self._watch is not None:
                    watch, self._watch = self._watch, None
                    await watch.cancel()
            except RetryableError as error:
                self.counts["failed"] += 1
                logger.info("no cut was made: %s", error)
            except Exception:  # without cuts the run goes on; logged and counted
                self.counts["errors"] += 1
                logger.exception("making a cut failed")
            await self._until_woken(NEXT_SECONDS if self._asked is not None else LOOK_EVERY_SECONDS)

    async def _until_woken(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _took_part(self, group: str, record: PartRecord) -> None:
        self._parts[group] = record
        self._wake.set()

    def _groups(self) -> set[str]:
        """The groups that have members now; observers do not count."""
        members = [p.card for p in self._session.whole.roster if p.card.role in ("trainer", "aux")]
        return {group for card in members for group in card.groups}

    def _is_due(self) -> bool:
        if self._asked is not None:
            return True
        if not self._every_seconds or (len(self._groups()) < 2 and self.board.safe is None):
            return False
        now = self._session.clock.monotonic()
        if self._last_at is None:  # a coordinator that has just come lets groups find their own first
            self._last_at = now
        return now >= self._last_at + self._every_seconds

    async def _make(self) -> None:
        asked, self._asked = self._asked, None
        answering, self._asking = self._asking, []
        revision = self.board.safe_revision
        try:
            cut = await self._gather(asked or {}, is_asked=asked is not None)
            answer = CutNumber(number=cut.number if cut is not None else 0)
        except RetryableError as error:
            cut, answer = None, CutNumber(trouble=str(error)[:500])
        for each in answering:
            if not each.done():
                each.set_result(answer)
        self._last_at = self._session.clock.monotonic()
        if answer.trouble:
            raise RetryableError(answer.trouble)
        if cut is not None:
            await self._see_to_safety(cut, revision)

    async def _gather(self, epochs: Mapping[str, int], *, is_asked: bool) -> Cut | None:
        """All groups' parts, written down as one cut; None: nothing has moved since the last one."""
        number = self.board.last_number + 1
        groups = self._groups()
        await self.board.want(WantedCut(number=number, epochs={group: epochs.get(group, -1) for group in groups}))
        parts = await self._until_parts(number, groups, set(epochs))
        if not parts:
            raise RetryableError("no group of the run has a state yet")
        newest = self.board.made.get(max(self.board.made, default=0))
        if not is_asked and newest is not None and newest.parts == parts and newest == self.board.latest():
            return None
        cut = Cut(number=number, parts=parts, coordinator=self._session.peer_id, made_at=self._session.now())
        await self.board.make(cut)
        await self.board.until(lambda: number in self.board.made)
        self.counts["made"] += 1
        logger.info("%s is made", cut.describe())
        return cut

    async def _until_parts(self, number: int, groups: set[str], named: set[str]) -> dict[str, CutPart]:
        clock = self._session.clock
        until = clock.monotonic() + ANSWER_SECONDS
        while True:
            answers = {group: self._parts[group] for group in groups if group in self._parts}
            answers = {group: record for group, record in answers.items() if record.number == number}
            troubles = [record.trouble for record in answers.values() if record.trouble]
            if troubles:
                raise RetryableError(troubles[0])
            missing = groups - answers.keys()
            is_late = clock.monotonic() >= until
            if missing & named and is_late:
                raise RetryableError(
                    f"nobody has held the epoch that was named of group {min(missing & named)!r} within "
                    f"{ANSWER_SECONDS:g} s: has the group a coordinator, and does it train?"
                )
            if not missing or is_late:
                self._say_left_out(frozenset(missing))
                return {group: record.part for group, record in answers.items() if record.part is not None}
            self._check_term()
            self._wake.clear()
            await self._until_woken(LOOK_EVERY_SECONDS)

    def _say_left_out(self, missing: frozenset[str]) -> None:
        if missing - self._left_out:
            logger.warning(
                "a cut is made without the groups %s: nobody coordinates them, or nobody has their state. They would "
                "go on from their own newest backups",
                ", ".join(sorted(missing)),
            )
        self._left_out = missing

    async def _see_to_safety(self, cut: Cut, revision: int) -> None:
        """Wait until all parts are on trusted disks, and say so; or until another is wanted instead."""
        clock = self._session.clock
        until = clock.monotonic() + SAVE_SECONDS
        while not all(self._is_saved(cut.number, group) for group in cut.parts):
            self._check_term()
            if self._asked is not None:  # another is wanted: this one has a little more time
                until = min(until, clock.monotonic() + ASKED_SECONDS)
            if clock.monotonic() >= until:
                raise RetryableError(f"{cut.describe()} is not on trusted disks: does a peer save backups (the host?)")
            self._wake.clear()
            await self._until_woken(LOOK_EVERY_SECONDS)
        try:
            await self.board.declare_safe(cut.number, expected=revision)
        except RevisionConflictError:
            raise RetryableError(f"a group has gone back to an earlier cut while {cut.describe()} was saved") from None
        self.counts["safe"] += 1
        logger.info("%s is on trusted disks", cut.describe())
        for old in sorted(self.board.made)[:-MOST_CUTS]:
            await self.board.forget(old)

    def _is_saved(self, number: int, group: str) -> bool:
        record = self._parts.get(group)
        return record is not None and record.number == number and record.is_saved

    def _check_term(self) -> None:
        if not self._lease.is_held:
            raise RetryableError("this peer does not coordinate main any more: its successor makes another cut")
