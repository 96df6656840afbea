"""An event loop in a thread of its own, and how another thread has things done on it.

A user's training loop is synchronous, and hub and links live on an event loop. This is the only place where the two
meet: the loop's thread runs nothing but the loop, and a caller from outside waits, now or later (calls.py).

    with LoopThread() as loop:
        peer = loop.call(start_peer())

While a peer trains, Python's threads should give way to each other more often than by default: TLS hands over bytes in
records of 16 KiB and releases the interpreter lock for each, and with the default of 5 ms a busy training thread
would keep the lock for so long each time. Half a millisecond costs the training thread nothing that can be measured.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from potluck import tasks
from potluck.errors import ConfigurationError
from potluck.run.calls import Call

logger = logging.getLogger(__name__)

T = TypeVar("T")

SWITCH_SECONDS = 0.0005
LEAVE_SECONDS = 30.0  # what is left on the loop gets so long to end


class RunningLoop:
    """An event loop that runs in one thread, for the use of others."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None, thread: threading.Thread | None = None) -> None:
        self._loop = loop
        self._thread = thread

    @classmethod
    def of_this_thread(cls) -> RunningLoop:
        """The loop that runs here, for threads that this one starts."""
        return cls(asyncio.get_running_loop(), threading.current_thread())

    def submit(self, work: Coroutine[Any, Any, T]) -> Call[T]:
        """Have a coroutine run on the loop, and do not wait; the call knows what comes of it."""
        call = self._call(work)
        call.begin()
        return call

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Have a coroutine run on the loop and wait for it. Ctrl-C ends the coroutine first, and then goes on."""
        call = self._call(work)
        try:
            call.begin()
            return call.result()
        except BaseException:
            call.end(LEAVE_SECONDS)  # interrupted here, while the work goes on there
            raise

    def soon(self, function: Callable[[], object]) -> None:
        """Have a function called on the loop, and do not wait."""
        self._usable_loop().call_soon_threadsafe(function)

    def _call(self, work: Coroutine[Any, Any, T]) -> Call[T]:
        try:
            return Call(work, self._usable_loop())
        except BaseException:
            work.close()
            raise

    def _usable_loop(self) -> asyncio.AbstractEventLoop:
        if self._thread is None or self._loop is None:
            raise ConfigurationError("the run was left already: do this inside of `with potluck.join(…) as run:`")
        if threading.current_thread() is self._thread:
            raise RuntimeError("the event loop's own thread must not wait for the event loop")
        return self._loop


class LoopThread(RunningLoop):
    """An event loop with a thread of its own."""

    def __init__(self, name: str = "potluck-loop") -> None:
        super().__init__()
        self._name = name

    @property
    def is_running(self) -> bool:
        """Whether work is taken."""
        return self._thread is not None

    def start(self) -> None:
        """Start the thread; returns when the loop runs."""
        if self._thread is not None:
            return
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name=self._name, daemon=True)
        self._thread.start()
        started.wait()
        _eager_switching.enter()

    def close(self) -> None:
        """End every task that is left and the thread. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._loop.stop)
        thread.join()
        _eager_switching.leave()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _run(self, started: threading.Event) -> None:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            loop = self._loop = runner.get_loop()
            loop.call_soon(started.set)
            loop.run_forever()
            loop.run_until_complete(_end_all())


async def _end_all() -> None:
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    await tasks.end(*left)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Of the fastest loop there is that can watch sockets: links need that, and Windows' own default cannot."""
    try:
        import uvloop
    except ImportError:
        return asyncio.SelectorEventLoop
    return uvloop.new_event_loop


class _EagerSwitching:
    """Threads give way quickly while at least one loop thread runs; afterwards as they did before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._before_seconds = 0.0

    def enter(self) -> None:
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._before_seconds = sys.getswitchinterval()
                sys.setswitchinterval(min(SWITCH_SECONDS, self._before_seconds))

    def leave(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                sys.setswitchinterval(self._before_seconds)


_eager_switching = _EagerSwitching()
