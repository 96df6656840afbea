"""Waiting for a condition with a deadline.

A condition's own exceptions are not swallowed: they are what the test should fail with. When the deadline passes, the
message says what was waited for and what was last seen.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

T = TypeVar("T")
Description = str | Callable[[], str]

POLL_SECONDS = 0.02


class ConditionNotMetError(AssertionError):
    """The deadline passed, and the condition was still not true."""


async def poll_until(
    condition: Callable[[], T | Awaitable[T | None] | None],
    deadline_seconds: float,
    describe: Description,
    *,
    every_seconds: float = POLL_SECONDS,
) -> T:
    """Call the condition, plain or async, until what it returns is true, and return that.

    `describe` says what is waited for ("bob to see alice"); if it is a function, it is called when the deadline has
    passed. The condition is called at least once, and once more after the deadline: a machine that was busy for all of
    that time is not taken for a condition that never came true.
    """
    end = time.monotonic() + deadline_seconds
    while True:
        last_chance = time.monotonic() >= end
        answer = condition()
        seen = cast(T | None, await answer if inspect.isawaitable(answer) else answer)
        if seen:
            return seen
        if last_chance:
            raise _not_met(describe, deadline_seconds, seen)
        await asyncio.sleep(every_seconds)


def poll_until_sync(
    condition: Callable[[], T | None],
    deadline_seconds: float,
    describe: Description,
    *,
    every_seconds: float = POLL_SECONDS,
) -> T:
    """Do as `poll_until` does, where there is no event loop."""
    end = time.monotonic() + deadline_seconds
    while True:
        last_chance = time.monotonic() >= end
        if seen := condition():
            return seen
        if last_chance:
            raise _not_met(describe, deadline_seconds, seen)
        time.sleep(every_seconds)


def _not_met(describe: Description, deadline_seconds: float, seen: object) -> ConditionNotMetError:
    what = describe if isinstance(describe, str) else describe()
    return ConditionNotMetError(f"waited {deadline_seconds:g} s for {what}; last seen: {seen!r}")
