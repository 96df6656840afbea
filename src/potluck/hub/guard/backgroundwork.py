"""Work that the guard does on the side: bounded in number, and no failure of one stops another."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from potluck import tasks
from potluck.errors import PotluckError

logger = logging.getLogger(__name__)

Work = Coroutine[Any, Any, None]
AGAIN_SECONDS = 1.0
SILENT_SECONDS = 60.0
MAX_TOLD = 64


class BackgroundWork:
    """The tasks of one owner."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._running: set[asyncio.Task[None]] = set()
        self._loops: set[asyncio.Task[None]] = set()
        self._closed = False
        self._told: dict[str, float] = {}
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._running)

    def spawn(self, work: Work) -> None:
        """Do it soon; dropped and counted when too much is under way already."""
        if self._closed or len(self._running) >= self._limit:
            self.counts["dropped_tasks"] += 1
            work.close()
            return
        task = asyncio.create_task(self._run(work))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _: work.close())  # if it was cancelled before it could begin

    def keep_running(self, loop: Callable[[], Work], name: str) -> None:
        """Run a loop that should never end, and run it again if it does by an error."""
        self._loops.add(asyncio.create_task(self._repeat(loop), name=name))

    async def close(self) -> None:
        """End everything. Idempotent."""
        self._closed = True
        await tasks.end(*self._loops, *self._running)
        self._loops.clear()

    async def _run(self, work: Work) -> None:
        try:
            await work
        except PotluckError as error:
            self.counts["failed_answers"] += 1
            self._tell(str(error))
        except Exception:  # a question's journey ends here: the next one must still be answered
            self.counts["task_errors"] += 1
            logger.exception("a question went unanswered because of a bug")

    def _tell(self, why: str) -> None:
        """Say why a question went unanswered; the same again only after a while, since the peer asks again."""
        now = asyncio.get_running_loop().time()
        self._told = {text: at for text, at in self._told.items() if now - at < SILENT_SECONDS}
        if why in self._told:
            logger.debug("a question went unanswered: %s", why)
        elif len(self._told) < MAX_TOLD:
            self._told[why] = now
            logger.warning("a question went unanswered: %s", why)

    async def _repeat(self, loop: Callable[[], Work]) -> None:
        while True:
            try:
                await loop()
            except Exception:  # the roster must be kept, whatever one turn ran into
                self.counts["task_errors"] += 1
                logger.exception("a loop failed because of a bug; it goes on")
            await asyncio.sleep(AGAIN_SECONDS)
