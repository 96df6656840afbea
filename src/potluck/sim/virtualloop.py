"""An event loop on which waiting takes no time: for tests of code that sleeps and has deadlines.

When nothing can go on, the loop's time jumps to the next timer. An hour of renewals and retries runs in milliseconds
and in the same order every time. Everything must live on the loop: a thread or a real socket would be overtaken.

Time is always a whole number of ticks of 2⁻²⁰ s, about a microsecond, so that differences of times are exact, and a
timer's time has come when it fires. Else a task that waits for what is missing until a deadline could find that less
than the smallest step of a floating-point number is missing, and wait for that for ever: no time passes by itself here.

    @in_virtual_time
    async def test_patience() -> None: ...

What is started inside `process("alice")` belongs to a process of that name, which can be stopped as by SIGSTOP: its
callbacks and timers wait until it goes on, then run in the order in which they came due, while time passes for others.

    with process("alice"):
        task = asyncio.create_task(work())
    loop.freeze("alice"); await asyncio.sleep(5); loop.thaw("alice")
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import heapq
import math
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, TypeVarTuple

from potluck.sim.virtualclock import START_WALL_SECONDS
from potluck.testing.leaks import pending_tasks

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

START_SECONDS = 1000.0
THREAD_SECONDS = 0.1  # for work in a thread, before timers count on
LONGEST_THREAD_SECONDS = 60.0  # … where none is set
TICKS_PER_SECOND = 2.0**20  # a power of two, so that differences of times are exact

_PROCESS = contextvars.ContextVar("process", default="")


@contextmanager
def process(name: str) -> Iterator[None]:
    """Whatever is scheduled inside belongs to the process of that name, and so does what it schedules itself."""
    token = _PROCESS.set(name)
    try:
        yield
    finally:
        _PROCESS.reset(token)


class NothingLeftError(AssertionError):
    """All tasks wait, and no timer is set: without virtual time, this test would hang."""


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = START_SECONDS
        self.num_in_threads = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if self.num_in_threads:  # what a thread does takes real time, and no virtual one
            ready = super().select(LONGEST_THREAD_SECONDS if timeout is None else THREAD_SECONDS)
            if ready:
                return ready
        if timeout is None:
            raise NothingLeftError("everybody waits, and no timer is set: nothing would ever happen again")
        self.move_to(self.now + timeout)
        return []

    def move_to(self, when: float) -> None:
        """Let it be the first tick that is not before `when`; time never goes back."""
        self.now = max(self.now, math.ceil(when * TICKS_PER_SECOND) / TICKS_PER_SECOND)


# Handles ask the loop before they run. asyncio has no public way to say so, hence the underscores.


class _Handle(asyncio.Handle):
    def _run(self) -> None:
        if not self._loop.parks(self):  # type: ignore[attr-defined]
            super()._run()


class _TimerHandle(asyncio.TimerHandle):
    def _run(self) -> None:
        self._loop.move_to(self.when())  # type: ignore[attr-defined]
        if not self._loop.parks(self):  # type: ignore[attr-defined]
            super()._run()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio loop whose time jumps from timer to timer."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        self._parked: dict[str, list[asyncio.Handle]] = {}  # what frozen processes have to do
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds."""
        return self._jumping.now

    def move_to(self, when: float) -> None:
        """Let it be `when`, unless it is later already."""
        self._jumping.move_to(when)

    def freeze(self, name: str) -> None:
        """Stop a process. Idempotent."""
        self._parked.setdefault(name, [])

    def thaw(self, name: str) -> None:
        """Let a process go on; nothing happens if it was not stopped."""
        self._ready.extend(handle for handle in self._parked.pop(name, []) if not handle.cancelled())

    def is_frozen(self, name: str) -> bool:
        """Whether a process is stopped."""
        return name in self._parked

    def parks(self, handle: asyncio.Handle) -> bool:
        """Whether this is for later, since its process is stopped."""
        parked = self._parked.get(handle._context.get(_PROCESS, "")) if self._parked else None  # type: ignore[attr-defined]
        if parked is None:
            return False
        parked.append(handle)
        return True

    def run_in_executor(
        self, executor: concurrent.futures.Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """As ever; the thread is waited for in real time."""
        self._jumping.num_in_threads += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._thread_is_done)
        return future

    def _thread_is_done(self, _future: asyncio.Future[Any]) -> None:
        self._jumping.num_in_threads -= 1

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Wait for its threads in real time."""
        self._jumping.num_in_threads += 1
        try:
            await super().shutdown_default_executor()
        finally:
            self._jumping.num_in_threads -= 1

    def _call_soon(
        self, callback: Callable[..., object], args: Any, context: contextvars.Context | None
    ) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Call at that time."""
        timer = _TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer


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
