"""Time that moves only when told to.

`TimerSchedule` is a heap of calls with a time of its own: a simulator runs a whole network on one, without an event
loop. `VirtualClock` shows that time to a component as a `potluck.clock.Clock`; several clocks on one schedule can
disagree about the hour, as machines do. Calls at the same time run in the order in which they were asked for, so that
a run can be repeated.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

START_WALL_SECONDS = 1_700_000_000.0  # some time in 2023: a sum of wall and monotonic time by mistake shows at once


@dataclass(order=True)
class Timer:
    """A call that will be made; `cancel` it to have it not made."""

    due_at: float
    _order: int
    _callback: Callable[[], object] | None = field(compare=False)

    @property
    def pending(self) -> bool:
        """Whether the call is still to come."""
        return self._callback is not None

    def cancel(self) -> None:
        """Do not make the call; nothing happens if it has been made or cancelled."""
        self._callback = None

    def _run(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class TimerSchedule:
    """Calls in the order of their times. What a call raises comes out of the method that ran it."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._timers: list[Timer] = []
        self._order = itertools.count()
        self._running = False

    def now(self) -> float:
        """Seconds; during a call the time for which it was asked, however far `advance` goes."""
        return self._now

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        """Make the call at that time; a time that has passed means as soon as time moves on, if only by nothing."""
        if not math.isfinite(when):
            raise ValueError(f"a call cannot be made at {when}")
        timer = Timer(max(when, self._now), next(self._order), callback)
        heapq.heappush(self._timers, timer)
        return timer

    def call_later(self, delay_seconds: float, callback: Callable[[], object]) -> Timer:
        """Make the call after so many seconds."""
        return self.call_at(self._now + delay_seconds, callback)

    def next_at(self) -> float | None:
        """When the next call is due; None when there is none."""
        while self._timers and not self._timers[0].pending:
            heapq.heappop(self._timers)
        return self._timers[0].due_at if self._timers else None

    def run_next(self) -> bool:
        """Move to the next call and make it; false when there is none."""
        due_at = self.next_at()
        if due_at is None:
            return False
        self._run_first()
        return True

    def run_until(self, when: float) -> int:
        """Make every call that is due by then, also those that they ask for, end at that time; return how many."""
        if not when >= self._now:  # also refuses what is not a number
            raise ValueError(f"time cannot go back from {self._now} to {when}")
        count = 0
        while (due_at := self.next_at()) is not None and due_at <= when:
            self._run_first()
            count += 1
        if math.isfinite(when):
            self._now = when
        return count

    def run_until_idle(self, max_calls: int = 1_000_000) -> int:
        """Make calls until none is left and return how many; more than `max_calls` means that it never would end."""
        for count in range(max_calls):
            if not self.run_next():
                return count
        if self.next_at() is None:
            return max_calls
        raise RuntimeError(
            f"still not idle after {max_calls} calls, at {self._now} s; is a timer setting itself again?"
        )

    def _run_first(self) -> None:
        if self._running:
            raise RuntimeError("a call tried to move the time that it runs in; let it ask for a later call instead")
        timer = heapq.heappop(self._timers)
        self._now = timer.due_at
        self._running = True
        try:
            timer._run()
        finally:
            self._running = False


class VirtualClock:
    """A `Clock` for tests and simulators; `advance` moves it and makes the calls that fall due."""

    def __init__(
        self,
        schedule: TimerSchedule | None = None,
        *,
        monotonic_offset_seconds: float = 1000.0,
        wall_offset_seconds: float = START_WALL_SECONDS,
    ) -> None:
        """Show the schedule's time with these offsets; a machine whose clock is wrong has another wall offset."""
        self.schedule = schedule if schedule is not None else TimerSchedule()
        self._monotonic_offset_seconds = monotonic_offset_seconds
        self._wall_offset_seconds = wall_offset_seconds

    def monotonic(self) -> float:
        """Seconds that only grow."""
        return self.schedule.now() + self._monotonic_offset_seconds

    def wall(self) -> float:
        """Seconds since 1970, as this machine believes."""
        return self.schedule.now() + self._wall_offset_seconds

    def set_wall(self, seconds: float) -> None:
        """Set the machine's clock, forwards or back, as a person or a time server does; `monotonic` goes on."""
        self._wall_offset_seconds = seconds - self.schedule.now()

    def advance(self, seconds: float) -> int:
        """Let time pass, make the calls that fall due meanwhile, and return how many."""
        return self.schedule.run_until(self.schedule.now() + seconds)

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        """Make the call when `monotonic` is so much."""
        return self.schedule.call_at(when - self._monotonic_offset_seconds, callback)

    def call_later(self, delay_seconds: float, callback: Callable[[], object]) -> Timer:
        """Make the call after so many seconds."""
        return self.schedule.call_later(delay_seconds, callback)
