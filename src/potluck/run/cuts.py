"""Cuts: one committed epoch of each group of a run, by which the run is saved and resumed as a whole.

    cut = run.cuts.latest()                       # the newest that is on trusted disks; None: there is none yet
    cut.epochs                                    # {"main": 120, "critic": 431}
    cut = run.cuts.propose(timeout_seconds=60)    # ask for one now, and wait until every group has a holder of its part
    cut = run.cuts.propose({"stage-0": 80, "stage-1": 80}, saved=True, timeout_seconds=600)

Groups commit at their own pace. The coordinator of `main` makes a cut now and then, and when a program asks for one:

1. *Wanted*: it writes a number, and of which groups. Each group's coordinator names a committed epoch, and has the
   keepers of the group hold that state (state/cutting.py). When somebody holds it, it writes down the group's part.
2. *Made*: all parts are there. The cut is written once, under its number, and never changed.
3. *Safe*: each part is on the disk of a peer that is trusted or may coordinate. The record `safe` names the newest such
   cut; from then on nobody has to hold its states in memory.

A group whose present state nobody has goes back to its part of the newest safe cut, and says so in that record, by a
compare-and-set. A cut that was begun before does not become safe then: all groups of a run that was killed go back to
the same one.

What stands in the hub is described in cutboard.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from potluck.errors import ConfigurationError, DeadlineExceededError, PeerError, RetryableError
from potluck.hub.leaserecord import KEY as LEASE_KEY
from potluck.hub.leaserecord import LeaseRecord
from potluck.hub.subjects import check_group_name
from potluck.run.cutboard import AskForCut, Cut, CutBoard, CutNumber, board_of, read
from potluck.run.group import LinkedPeer

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.5

T = TypeVar("T")


class CallingRun(Protocol):
    """What cuts need of a joined run; `potluck.run.joined.Joined` is one."""

    @property
    def peer(self) -> LinkedPeer:
        """The peer, which lives on the run's loop."""
        ...

    def call_unless_leaving(self, work: Coroutine[Any, Any, T]) -> T:
        """Have a coroutine run on the loop and wait for it."""
        ...


class Cuts:
    """The cuts of a run, for a program's threads."""

    def __init__(self, run: CallingRun) -> None:
        self._run = run

    def latest(self) -> Cut | None:
        """The newest cut that is on trusted disks, to which the run would go back; None: there is none yet."""
        return self._run.call_unless_leaving(self._look(lambda board: board.latest()))

    def all(self) -> list[Cut]:
        """All cuts that the hub knows of, the newest first; one that is newer than `latest()` may not be safe yet."""
        return self._run.call_unless_leaving(
            self._look(lambda board: sorted(board.made.values(), key=lambda cut: -cut.number))
        )

    def propose(
        self, epochs: Mapping[str, int] | None = None, *, saved: bool = False, timeout_seconds: float = 60.0
    ) -> Cut:
        """Have a cut made now, of all groups that have members, and wait until it is written; any member may.

        `epochs` names the epoch of a group that is to be in it, present or to come; of groups that it does not name,
        the newest is. With `saved`, wait until it is on trusted disks too. RetryableError when it came to nothing, with
        the reason; DeadlineExceededError when it took longer.
        """
        wanted = dict(epochs or {})
        for group, epoch in wanted.items():
            check_group_name(group)
            if epoch < 0:
                raise ConfigurationError(f"epoch {epoch} of group {group!r} cannot be in a cut: name one from 0 on")
        return self._run.call_unless_leaving(propose(self._run.peer, wanted, saved, timeout_seconds))

    def roll_back(self, number: int, *, timeout_seconds: float = 60.0) -> int:
        """Have all groups of a cut go back to it, each as soon as it can; the number of the order.

        Each group commits an epoch whose state is that of the cut; its members fetch it. For organisers: others are
        refused.
        """
        return self._run.call_unless_leaving(ask_to_return(self._run.peer, number, timeout_seconds))

    async def _look(self, look: Callable[[CutBoard], T]) -> T:
        board = board_of(self._run.peer.session)
        await board.start()
        try:
            return look(board)
        finally:
            await board.close()


async def propose(peer: LinkedPeer, epochs: Mapping[str, int], saved: bool, timeout_seconds: float) -> Cut:
    """As `Cuts.propose`, on the event loop."""
    board = board_of(peer.session)
    await board.start()
    number = 0

    def is_there() -> bool:
        is_over = board.last_number > number  # another was wanted since
        return number in board.made and (not saved or is_safe(board, number) or is_over)

    try:
        async with asyncio.timeout(timeout_seconds):
            answer = await _ask(peer, AskForCut(epochs=dict(epochs)), timeout_seconds)
            number = answer.number
            await board.until(is_there)
    except TimeoutError:
        what = f"cut {number} is not made" if number not in board.made else f"cut {number} is not on trusted disks"
        remedy = "see `potluck monitor` for groups that have no coordinator or nobody who saves (the host does)"
        raise DeadlineExceededError(f"{what} within {timeout_seconds:g} s: {remedy}") from None
    finally:
        await board.close()
    if saved and not is_safe(board, number):
        raise RetryableError(f"cut {number} was given up before all groups had saved it: ask for another")
    return board.made[number]


async def ask_to_return(peer: LinkedPeer, number: int, timeout_seconds: float) -> int:
    """As `Cuts.roll_back`, on the event loop."""
    try:
        async with asyncio.timeout(timeout_seconds):
            return (await _ask(peer, AskForCut(return_to=number), timeout_seconds)).order
    except TimeoutError:
        raise DeadlineExceededError(
            f"nobody has taken the order to go back to cut {number} within {timeout_seconds:g} s: is the host there?"
        ) from None


def is_safe(board: CutBoard, number: int) -> bool:
    """Whether a cut, or a later one, is on trusted disks."""
    return board.safe is not None and board.safe.number >= number


async def _ask(peer: LinkedPeer, question: AskForCut, timeout_seconds: float) -> CutNumber:
    """The answer of the coordinator of main; asked again while there is none."""
    store = peer.session.hub.store("lease")
    while True:
        entry = await store.get(LEASE_KEY)
        record = read(LeaseRecord, entry) if entry is not None else None
        if record is not None:
            try:
                answer = await peer.links.request(
                    record.holder, question, reply=CutNumber, timeout_seconds=timeout_seconds
                )
            except (RetryableError, PeerError) as error:
                logger.debug("the coordinator of main was not asked for a cut yet: %s", error)
            else:
                if answer.message.trouble:
                    raise RetryableError(answer.message.trouble)
                return answer.message
        await asyncio.sleep(RETRY_SECONDS)
