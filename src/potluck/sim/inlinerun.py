"""A joined run without threads: its event loop runs in the caller's thread, and only while the caller waits.

So code that is written for a user's thread (Driver, Recovery) runs in virtual time: a wait of an hour takes no time,
and everything happens in the same order every time.

    with InlineRun() as run:
        driver = Driver(run, …)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from potluck.run.loopthread import RunningLoop
from potluck.sim.virtualclock import START_WALL_SECONDS
from potluck.sim.virtualloop import VirtualTimeLoop

T = TypeVar("T")


class InlineCall(Generic[T]):
    """Work on the loop: what `potluck.run.calls.Call` is with threads."""

    def __init__(self, inline: InlineLoop, work: Coroutine[Any, Any, T]) -> None:
        self._inline = inline
        self._task = inline.loop.create_task(work)

    @property
    def is_known(self) -> bool:
        """Whether the work has ended."""
        return self._task.done()

    @property
    def error(self) -> BaseException | None:
        """What went wrong with work that has ended; None if nothing did."""
        return asyncio.CancelledError() if self._task.cancelled() else self._task.exception()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Have the loop run until the end, for so long; whether it has come."""
        self._inline.call(asyncio.wait({self._task}, timeout=timeout_seconds))
        return self._task.done()

    def result(self) -> T:
        """Wait for the end, and return or raise what came of it."""
        self.wait()
        return self._task.result()

    def end(self, timeout_seconds: float) -> None:
        """Cancel the work if it still goes on, and wait for its end for so long."""
        self._task.cancel()
        self.wait(timeout_seconds)


class InlineLoop(RunningLoop):
    """An event loop in virtual time that runs while its own thread waits for it. Also a Clock that shows its time."""

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner(loop_factory=VirtualTimeLoop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._runner.close()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop in virtual time."""
        return self._runner.get_loop()

    def monotonic(self) -> float:
        """Virtual seconds."""
        return self.loop.time()

    def wall(self) -> float:
        """Virtual seconds since 1970."""
        return START_WALL_SECONDS + self.monotonic()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Have the loop run until the work is done."""
        return self._runner.run(work)

    def submit(self, work: Coroutine[Any, Any, T]) -> InlineCall[T]:  # type: ignore[override]
        """Have work done the next time that somebody waits."""
        return InlineCall(self, work)

    def soon(self, function: Callable[[], object]) -> None:
        """Have a function called the next time that somebody waits."""
        self.loop.call_soon(function)


class InlineRun(InlineLoop):
    """What an optimizer's parts need of a joined run, without a hub."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = self
        self.is_interrupted = False
        self.is_leaving: Callable[[], bool] = lambda: False

    def call_unless_leaving(self, work: Coroutine[Any, Any, T]) -> T:
        """As `call`."""
        return self.call(work)

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.call(asyncio.sleep(seconds))

    def attach(self, close: Callable[[], Awaitable[None]]) -> None:
        """Nothing is closed here: what a test makes, it closes."""

    def check(self) -> None:
        """This peer is in the run."""
