"""What is seen while a demo runs: a line for each event, and a live table below."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rich.live import Live

from potluck import tasks
from potluck.cli import console
from potluck.cli.demo.observer import DemoObserver
from potluck.cli.monitor import picture

EVERY_SECONDS = 0.5


class Display:
    """Where the observer looks; shows nothing when `quiet`."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet

    def say(self, text: str) -> None:
        """One line of the story."""
        if not self._quiet:
            console.out.print(text, highlight=False)

    @asynccontextmanager
    async def table_of(self, observer: DemoObserver) -> AsyncIterator[None]:
        """Show the run live for as long as this lasts."""
        if self._quiet or not console.out.is_terminal:
            yield
            return
        with Live(console=console.out, auto_refresh=False, transient=True) as live:
            showing = asyncio.create_task(_show(live, observer), name="demo: table")
            try:
                yield
            finally:
                await tasks.end(showing)


async def _show(live: Live, observer: DemoObserver) -> None:
    while True:
        live.update(picture(*observer.look()), refresh=True)
        await asyncio.sleep(EVERY_SECONDS)
