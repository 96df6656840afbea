"""Ending asyncio tasks for sure.

A single `task.cancel()` can be lost: `asyncio.wait_for` on Python 3.11 may swallow it when the awaited thing
finishes in the same instant, and a library's `except Exception` around an await may too. `end` cancels until
the task has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from potluck.errors import AccessError

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def end(*tasks: asyncio.Task[Any] | None, every_seconds: float = 0.2) -> None:
    """Cancel the tasks, in this order, until each has ended. Errors they end with are logged, not raised."""
    ours = [task for task in tasks if task is not None and task is not asyncio.current_task()]
    while pending := [task for task in ours if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=every_seconds)
    log_failures(ours)


async def finish(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Do all of this side by side, to its end: a caller that is cancelled meanwhile is so only when all is done."""
    ours = [asyncio.create_task(work) for work in works]
    cancelled: asyncio.CancelledError | None = None
    while pending := [task for task in ours if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        log_failures(ours)
        raise cancelled
    return await asyncio.gather(*ours)


def forgive(task: asyncio.Task[Any]) -> None:
    """A done callback: marks the task's error as seen. A waiter still gets it; without one it is not logged."""
    if not task.cancelled():
        task.exception()


def log_failures(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Say which of the finished tasks ended with an error. That a peer was thrown out, its session tells."""
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            level = logging.DEBUG if isinstance(error, AccessError) else logging.ERROR
            logger.log(level, "task %s ended with %r", task.get_name(), error, exc_info=error)
