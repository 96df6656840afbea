"""Calling the handler of a subscription: in order, one call at a time, with a bounded backlog.

A plain handler is called at once. One that waits gets a task for as long as there is something to do; what arrives
meanwhile queues up to a limit, and past it is dropped and counted: a slow handler never makes memory grow. The task
belongs to the subscription and not to the connection under it, so a lost connection does not break a handler off.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass

from potluck import tasks
from potluck.errors import RetryableError
from potluck.hub.connection import Delivery, Handler

logger = logging.getLogger(__name__)

BACKLOG_MESSAGES = 65_536
BACKLOG_BYTES = 64 * 1024 * 1024
FAILED = "a handler of %s failed; the message is lost, the next ones are handled"


@dataclass(slots=True)
class DispatchCounts:
    """What happened to the messages of all subscriptions of a connection."""

    handled: int = 0
    handler_errors: int = 0
    dropped: int = 0


class Dispatcher:
    """Calls one handler."""

    def __init__(
        self,
        subject: str,
        handler: Handler,
        counts: DispatchCounts,
        *,
        limit_messages: int = BACKLOG_MESSAGES,
        limit_bytes: int = BACKLOG_BYTES,
    ) -> None:
        self._subject = subject
        self._handler = handler
        self._counts = counts
        self._limit_messages = limit_messages
        self._limit_bytes = limit_bytes
        self._backlog: deque[Delivery] = deque()
        self._backlog_bytes = 0
        self._overflowing = False
        self._worker: asyncio.Task[None] | None = None
        self._waiting: Awaitable[None] | None = None  # the first thing for a worker that has not begun
        self._closed = False

    def offer(self, delivery: Delivery) -> None:
        """Take in one message. Returns at once."""
        if self._closed:
            return
        if self._worker is None:
            waiting = self._call(delivery)
            if waiting is not None:
                self._waiting = waiting
                self._worker = asyncio.create_task(self._work(), name=f"handler of {self._subject}")
            return
        size = len(delivery.payload)
        if len(self._backlog) >= self._limit_messages or self._backlog_bytes + size > self._limit_bytes:
            self._drop()
            return
        self._backlog.append(delivery)
        self._backlog_bytes += size

    async def close(self) -> None:
        """Stop: what is queued is not handled, and a handler that waits is ended (unless it is the caller)."""
        self._closed = True
        self._backlog.clear()
        self._backlog_bytes = 0
        await tasks.end(self._worker)
        self._let_go()

    def _drop(self) -> None:
        self._counts.dropped += 1
        if not self._overflowing:
            self._overflowing = True
            logger.warning(
                "the handler of %s is too slow: %d messages (%d bytes) wait, what comes now is dropped",
                self._subject,
                len(self._backlog),
                self._backlog_bytes,
            )

    def _call(self, delivery: Delivery) -> Awaitable[None] | None:
        try:
            waiting = self._handler(delivery)
        except Exception:  # a message's journey ends here: the next one must still be handled
            self._counts.handler_errors += 1
            logger.exception(FAILED, self._subject)
            return None
        if waiting is None:
            self._counts.handled += 1
        return waiting

    def _let_go(self) -> None:
        """A coroutine whose worker was ended before its first step is closed, not forgotten."""
        waiting, self._waiting = self._waiting, None
        if inspect.iscoroutine(waiting):
            waiting.close()

    async def _work(self) -> None:
        waiting, self._waiting = self._waiting, None
        try:
            while True:
                if waiting is not None:
                    await self._finish(waiting)
                if not self._backlog:
                    return
                delivery = self._backlog.popleft()
                self._backlog_bytes -= len(delivery.payload)
                waiting = self._call(delivery)
        finally:
            self._overflowing = False
            self._worker = None

    async def _finish(self, waiting: Awaitable[None]) -> None:
        try:
            await waiting
            self._counts.handled += 1
        except (RetryableError, TimeoutError) as error:  # no bug: the hub was away, or this process stood still
            self._counts.handler_errors += 1
            logger.warning("a message on %s was not dealt with: %s", self._subject, str(error) or "it took too long")
        except Exception:  # as in _call
            self._counts.handler_errors += 1
            logger.exception(FAILED, self._subject)
