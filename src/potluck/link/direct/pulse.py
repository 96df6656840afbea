"""Whether a silent connection still leads to somebody.

TCP alone may not notice for hours that the other end has gone, nor ever that it is frozen. So a connection that has
been silent for a while is asked by a packet of one byte, and answers by another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from potluck.clock import Clock
from potluck.link.direct.sockets import SocketSettings

DATA = 0  # first byte of a frame; the rest is the header, as it was given
ASK = 2  # first and only byte of a question
ANSWER = 3
DATA_MARK, ASK_MARK, ANSWER_MARK = bytes([DATA]), bytes([ASK]), bytes([ANSWER])
PAUSE_SECONDS = 1.0


class ProbedConnection(Protocol):
    """An open connection, as far as its pulse is concerned."""

    heard_at: float  # monotonic: when it was opened, or the last bytes came
    asked_at: float | None  # monotonic: when it was last asked in this silence

    def ask(self) -> None:
        """Send a question, if there is room."""
        ...


L = TypeVar("L", bound=ProbedConnection)


class Pulse(Generic[L]):
    """Looks after all connections of one carrier."""

    def __init__(self, settings: SocketSettings, clock: Clock) -> None:
        self._every_seconds = settings.heartbeat_seconds
        self._silence_seconds = settings.silence_seconds
        self._clock = clock
        self._checked_at = clock.monotonic()

    def check(self, lines: Iterable[L]) -> list[L]:
        """Ask the silent ones; return those that have been silent for too long. To be called often."""
        now = self._clock.monotonic()
        was_paused = now - self._checked_at > PAUSE_SECONDS
        self._checked_at = now
        lost: list[L] = []
        for line in lines:
            if was_paused:  # we slept ourselves: what came meanwhile is not read yet
                line.heard_at = now
            silent_seconds = now - line.heard_at
            if silent_seconds < self._every_seconds:
                line.asked_at = None
            elif line.asked_at is not None and silent_seconds >= self._silence_seconds + self._every_seconds:
                lost.append(line)
            elif line.asked_at is None or now - line.asked_at >= self._every_seconds:
                line.asked_at = now
                line.ask()
        return lost
