"""When this machine may train: hours of the day, by its own clock (pure)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, time, timedelta

from potluck.errors import ConfigurationError

_HOURS = re.compile(r"(\d{1,2}):(\d{2})\s*-\s*(\d{1,2}):(\d{2})")


@dataclass(frozen=True, slots=True)
class Hours:
    """From one time of the day to another, over midnight if that is earlier."""

    begin: time
    end: time

    @classmethod
    def parse(cls, text: str) -> Hours:
        """As in `22:00-07:00`; ConfigurationError otherwise."""
        found = _HOURS.fullmatch(text.strip())
        try:
            if found is None:
                raise ValueError("two times of the day belong there")
            first, last = (time(int(found[n]) % 24, int(found[n + 1])) for n in (1, 3))
            if int(found[1]) > 24 or int(found[3]) > 24:
                raise ValueError("a day has 24 hours")
        except ValueError as error:
            raise ConfigurationError(
                f"--schedule {text!r} cannot be read ({error}): write it as 22:00-07:00"
            ) from error
        if first == last:
            raise ConfigurationError(f"--schedule {text!r} begins where it ends: leave it out to train at any time")
        return cls(first, last)

    def is_open(self, now: datetime) -> bool:
        """Whether to train now."""
        clock = now.time().replace(tzinfo=None)
        if self.begin < self.end:
            return self.begin <= clock < self.end
        return clock >= self.begin or clock < self.end

    def seconds_until_open(self, now: datetime) -> float:
        """0 while it is open."""
        return 0.0 if self.is_open(now) else _seconds_until(self.begin, now)

    def seconds_until_close(self, now: datetime) -> float:
        """0 while it is closed."""
        return _seconds_until(self.end, now) if self.is_open(now) else 0.0

    def __str__(self) -> str:
        return f"{self.begin:%H:%M}-{self.end:%H:%M}"


def _seconds_until(clock: time, now: datetime) -> float:
    """Until it is that time of the day."""
    then = now.replace(hour=clock.hour, minute=clock.minute, second=0, microsecond=0)
    if then <= now:
        then += timedelta(days=1)
    return (then - now).total_seconds()
