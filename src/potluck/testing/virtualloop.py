"""An event loop on which waiting takes no time: for tests of code that sleeps and has deadlines.

When nothing can go on, the loop's time jumps to the next timer. An hour of renewals and retries runs in milliseconds
and in the same order every time. Everything must live on the loop: a thread or a real socket would be overtaken.

    @in_virtual_time
    async def test_patience() -> None: ...
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

from potluck.testing.leaks import pending_tasks
from potluck.testing.virtualclock import START_WALL_SECONDS

P = ParamSpec("P")

START_SECONDS = 1000.0


class NothingLeftError(AssertionError):
    """All tasks wait, and no timer is set: without virtual time, this test would hang."""


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = START_SECONDS

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if timeout is None:
            raise NothingLeftError("everybody waits, and no timer is set: nothing would ever happen again")
        self.now += timeout
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio loop whose time jumps from timer to timer."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds."""
        return self._jumping.now


class LoopClock:
    """The running loop's time as a `potluck.clock.Clock`; `wall_error_seconds` makes it a machine with a wrong one."""

    def __init__(self, wall_error_seconds: float = 0.0) -> None:
        self._wall_error_seconds = wall_error_seconds

    def monotonic(self) -> float:
        """Seconds that only grow."""
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        """Seconds since 1970, as this machine believes."""
        return START_WALL_SECONDS + self.monotonic() + self._wall_error_seconds


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an async test on a loop of its own in virtual time, and check that it leaves no task behind."""

    async def whole(*args: P.args, **kwargs: P.kwargs) -> None:
        await test(*args, **kwargs)
        left = await pending_tasks()
        assert not left, f"tasks are left pending: {left}"

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(whole(*args, **kwargs))

    return run
