"""Ways to a pooled value network: who trains it, and how a laptop gets at it.

A way takes fragments and shows the newest version, both without waiting. `LearnerWay` goes through the queue to one
learner; `TogetherWay` (together.py) trains the trunk with the other machines, in rounds.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Protocol

from potluck.errors import PotluckError, QueueFullError, RetryableError
from potluck.fleet.sync import Fleet
from potluck.fleet.topic import Topic
from potluck.fleet.value.fragment import Fragment
from potluck.fleet.value.learner import EXPERIENCE, VALUE, ValueLearner
from potluck.fleet.value.version import ValueVersion

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 5.0
RETRY_SECONDS = 1.0


class ValueWay(Protocol):
    """How a laptop takes part in a pooled value network."""

    def offer(self, fragment: Fragment) -> bool:
        """Hand a fragment over, without waiting; False when it is dropped, because too much waits already."""
        ...

    def newest(self) -> ValueVersion | None:
        """The newest version that has come; None before the first."""
        ...

    def statistics(self) -> dict[str, float]:
        """How it goes."""
        ...

    def close(self) -> None:
        """Take part no more. Idempotent."""
        ...


class LearnerWay:
    """Fragments go through a queue to one learner, which publishes versions on a topic."""

    def __init__(self, fleet: Fleet, *, experience: str = EXPERIENCE, value: str = VALUE) -> None:
        self.counts: Counter[str] = Counter()
        self._fleet = fleet
        self._queue = fleet.queue(experience, Fragment)
        self._newest: ValueVersion | None = None
        self._following = fleet.in_background(lambda each: self._follow(each.topic(value, ValueVersion)))

    def offer(self, fragment: Fragment) -> bool:
        """Send it in the background."""
        try:
            self._queue.send(fragment)
        except (QueueFullError, RetryableError) as error:
            self.counts["dropped"] += 1
            logger.info("a fragment is not shared: %s", error)
            return False
        self.counts["sent"] += 1
        return True

    def newest(self) -> ValueVersion | None:
        """The newest version that the hub told of."""
        return self._newest

    def statistics(self) -> dict[str, float]:
        """Fragments sent and dropped, versions that came."""
        return {name: float(self.counts[name]) for name in ("sent", "dropped", "versions", "unreadable")}

    def close(self) -> None:
        """Follow the topic no more. Idempotent."""
        self._following.end(LEAVE_SECONDS)

    async def _follow(self, topic: Topic[ValueVersion]) -> None:
        while True:
            try:
                async for version in topic.follow():
                    self._newest = version.value
                    self.counts["versions"] += 1
            except PotluckError as error:
                self.counts["unreadable"] += 1
                logger.warning("versions of the value network cannot be followed now: %s", error)
            await asyncio.sleep(RETRY_SECONDS)


class LocalWay:
    """A learner in the same process: for tests, benchmarks, and several policies of one program."""

    def __init__(self, learner: ValueLearner) -> None:
        self._learner = learner
        self._waiting: list[Fragment] = []
        self._version: ValueVersion | None = None

    def offer(self, fragment: Fragment) -> bool:
        """Keep it for `learn`."""
        self._waiting.append(fragment)
        return True

    def newest(self) -> ValueVersion | None:
        """What `learn` made last."""
        return self._version

    def learn(self) -> int:
        """Have the learner go through all that was offered; returns how many fragments were fresh enough."""
        waiting, self._waiting = self._waiting, []
        learnt = self._learner.learn(waiting)
        if learnt:
            self._version = self._learner.version()
        return learnt

    def statistics(self) -> dict[str, float]:
        """The learner's."""
        return self._learner.statistics()

    def close(self) -> None:
        """Nothing is held."""
