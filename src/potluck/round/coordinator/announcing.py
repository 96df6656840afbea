"""What a coordinator says and writes: signed plans and aborts on the hub, commits to the lineage."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from potluck.errors import RetryableError, RevisionConflictError
from potluck.faultpoints import reach
from potluck.peer.lease import Lease
from potluck.peer.session import Session
from potluck.round.lineage import Lineage
from potluck.round.plan.messages import Commit, Plan
from potluck.round.plan.signing import Word, sign_word

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.2


class Announcer:
    """The pen of one candidate."""

    def __init__(self, session: Session, lease: Lease, lineage: Lineage, counts: Counter[str]) -> None:
        """`counts` are the coordinator's."""
        self._session = session
        self._lease = lease
        self._lineage = lineage
        self._counts = counts

    async def say(self, word: Word) -> None:
        """Tell everybody, once: a plan is said again while somebody has not answered it."""
        session = self._session
        data = sign_word(word, session.identity, session.subjects.run)
        try:
            await session.hub.publish(session.subjects.plan(session.peer_id), data)
        except RetryableError as error:
            self._counts["unsaid"] += 1
            logger.info("%s could not be published: %s", type(word).__name__.lower(), error)

    async def publish(self, plan: Plan, milestone: str) -> None:
        """Say a plan, and that it was said."""
        await self.say(plan)
        reach(milestone, **self._labels(plan))

    async def commit(self, commit: Commit, plan: Plan) -> None:
        """Move the head. While the hub is away it is tried again, for as long as the lease holds."""
        reach("round.committing", **self._labels(plan))
        while self._lease.token == commit.term:
            try:
                await self._lineage.commit(commit, self._session.identity)
            except RevisionConflictError as error:
                logger.warning("%s was not committed: %s", plan.key, error)
                return
            except RetryableError as error:
                self._counts["retries"] += 1
                logger.info("%s cannot be committed just now: %s", plan.key, error)
                await asyncio.sleep(RETRY_SECONDS)
            else:
                self._counts["commits"] += 1
                reach("round.committed", **self._labels(plan))
                return

    def _labels(self, plan: Plan) -> dict[str, object]:
        return {"peer": self._session.peer_id, "epoch": plan.key.epoch, "role": "coordinator"}
