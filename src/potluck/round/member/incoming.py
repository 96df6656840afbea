"""Contributions and averages on their way to the round that they belong to.

The plan comes by way of the hub, and the members' messages over links: either may be first. A message that is ahead of
its plan, or of a revision of it, waits here for a while, and so does a contribution that is further ahead of the
averages than there is room for, as no honest member's is (lane.py). Its handler then is not finished, so that its
sender gets no credit for it, and memory stays bounded. What is behind, or for no round of ours, is dropped and counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from potluck.link.links import Incoming, Links
from potluck.round.member.roundwork import RoundWork
from potluck.round.plan.messages import Average, Contribution, RoundKey

EARLY_SECONDS = 5.0  # how long a message may be ahead of its plan, or wait for room

Mail = Incoming[Contribution] | Incoming[Average]


class IncomingFrames:
    """Sorts what members send."""

    def __init__(
        self, links: Links, current: Callable[[], RoundWork | None], expects: Callable[[RoundKey], bool]
    ) -> None:
        """`current` is the round we are in; `expects` tells whether a plan with that key may still come."""
        self.counts: Counter[str] = Counter()
        self._current = current
        self._expects = expects
        self._news = asyncio.Event()  # set, and replaced by another, when plans have changed or there is more room
        links.handle(Contribution, self._arrived)
        links.handle(Average, self._arrived)

    def look_again(self) -> None:
        """Plans have changed, or there is more room: what waits may have its turn."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _arrived(self, mail: Mail) -> Awaitable[None] | None:
        if self._sort(mail):
            return None
        self.counts["early_messages"] += 1
        return self._wait(mail)

    def _sort(self, mail: Mail) -> bool:
        """Take it in or drop it; False where it has to wait."""
        round_work, message = self._current(), mail.message
        if round_work is not None and message.key == round_work.key:
            if round_work.is_early(message.chunk, message.generation) or self._lacks_room(round_work, mail):
                return False
            self._deliver(round_work, mail)
        elif self._expects(message.key) and (round_work is None or message.key > round_work.key):
            return False
        else:
            self.counts["late_messages"] += 1
        return True

    def _lacks_room(self, round_work: RoundWork, mail: Mail) -> bool:
        message, sender = mail.message, round_work.index_by_peer.get(mail.sender)
        if not isinstance(message, Contribution) or sender is None:
            return False
        return not round_work.has_room(sender, message.chunk, message.generation)

    def _deliver(self, round_work: RoundWork, mail: Mail) -> None:
        message = mail.message
        sender = round_work.index_by_peer.get(mail.sender)
        if sender is None:
            self.counts["strangers_messages"] += 1
        elif isinstance(message, Average):
            round_work.take_average(sender, message.chunk, message.generation, mail.frames, message.seal)
        else:
            round_work.take_contribution(sender, message.chunk, message.generation, mail.frames, message.seal)

    async def _wait(self, mail: Mail) -> None:
        try:
            async with asyncio.timeout(EARLY_SECONDS):
                while not self._sort(mail):
                    await self._news.wait()
        except TimeoutError:
            self.counts["late_messages"] += 1
