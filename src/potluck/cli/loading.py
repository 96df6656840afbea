"""What is said while the run's state is loaded: how much of it is here."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from potluck.cli import console

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

TELL_EVERY_SECONDS = 1.0  # so a state that is here sooner is not told of at all


class Loading:
    """One load: a bar on the terminal that goes away when it is over, or JSON. Outside of it nothing is said."""

    def __init__(self, as_json: bool, now: Callable[[], float] = time.monotonic) -> None:
        self._as_json = as_json
        self._now = now
        self._is_open = False
        self._told_at = 0.0
        self._bar: tuple[Progress, TaskID] | None = None

    def __enter__(self) -> Self:
        self._told_at = self._now()
        self._is_open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._is_open = False
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None

    def tell(self, here_bytes: int, all_bytes: int) -> None:
        """So much is here, of so much."""
        now = self._now()
        if not self._is_open or now - self._told_at < TELL_EVERY_SECONDS:
            return
        self._told_at = now
        if self._as_json:
            console.print_json({"event": "loading", "bytes": here_bytes, "of": all_bytes})
            return
        if self._bar is None:
            self._bar = _open_bar(here_bytes, all_bytes)
        progress, task = self._bar
        progress.update(task, completed=here_bytes, total=all_bytes)


def _open_bar(here_bytes: int, all_bytes: int) -> tuple[Progress, TaskID]:
    """How much is here, how fast it comes, and how long that will take; what was here before counts for no speed."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    progress = Progress(*columns, TimeRemainingColumn(), console=console.err, transient=True)
    progress.start()
    return progress, progress.add_task("loading the run's state", total=all_bytes, completed=here_bytes)
