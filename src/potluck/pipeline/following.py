"""Whose word counts: the conductor, as this peer knows it. The coordinator of `main` is the conductor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LAG_SECONDS = 5.0  # by which a peer may hear of a new conductor later than from it


class Following:
    """The conductor of the moment."""

    def __init__(self, peer: str = "") -> None:
        self.peer = peer
        """Empty: nobody."""
        self._changed = asyncio.Event()
        self.on_change: Callable[[], None] = lambda: None

    def set(self, peer: str | None) -> None:
        """There is another one, or none."""
        if (peer or "") == self.peer:
            return
        self.peer = peer or ""
        self._changed.set()
        self._changed = asyncio.Event()
        self.on_change()

    async def accepts(self, sender: str) -> bool:
        """Whether this is the conductor; waits a little, in case we have not heard yet."""
        try:
            async with asyncio.timeout(LAG_SECONDS):
                while sender != self.peer:
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True
