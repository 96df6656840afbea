"""Tensor work without threads, for tests in virtual time: each job is done in a later turn of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from potluck.round.member.workers import Workers

T = TypeVar("T")


class InlineWorkers(Workers):
    """Workers that work on the event loop itself."""

    def __init__(self) -> None:
        super().__init__(1)

    def start(self) -> None:
        """There is nothing to start."""

    def submit(self, work: Callable[[], T], done: Callable[[T], None], failed: Callable[[Exception], None]) -> None:
        """Do the work soon."""

        def run() -> None:
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 - as the threads do: the caller that submitted the work judges
                failed(error)
            else:
                done(result)

        asyncio.get_running_loop().call_soon(run)
