"""What is said while the run's state is loaded: how much of it is here."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from potluck.cli import console

if TYPE_CHECKING:
    from rich.status import Status

TELL_EVERY_SECONDS = 1.0  # so a state that is here sooner is not told of at all


class Loading:
    """One load: a line on the terminal that goes away when it is over, or JSON. Outside of it nothing is said."""

    def __init__(self, as_json: bool, now: Callable[[], float] = time.monotonic) -> None:
        self._as_json = as_json
        self._now = now
        self._is_open = False
        self._told_at = 0.0
        self._status: Status | None = None

    def __enter__(self) -> Self:
        self._told_at = self._now()
        self._is_open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._is_open = False
        if self._status is not None:
            self._status.stop()

    def tell(self, here_bytes: int, all_bytes: int) -> None:
        """So much is here, of so much."""
        now = self._now()
        if not self._is_open or now - self._told_at < TELL_EVERY_SECONDS:
            return
        self._told_at = now
        if self._as_json:
            console.print_json({"event": "loading", "bytes": here_bytes, "of": all_bytes})
            return
        words = f"loading the run's state: {here_bytes / 1e6:.0f} of {all_bytes / 1e6:.0f} MB"
        if self._status is None:
            self._status = console.err.status(words)
            self._status.start()
        else:
            self._status.update(words)
