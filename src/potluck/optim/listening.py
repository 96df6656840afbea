"""Hearing the epochs that pass while the state before them is on its way.

A state that takes longer to fetch than an epoch lasts is outdated when it comes, and so would the next one be: such a
peer would never get in. So it takes part meanwhile, without weight: others do not wait for its samples, it averages for
nobody, and the averages that it hears are put on the state when that is here (`Recovery.catch_up`). It then does
what all others have done, to the same bits. Averages are much smaller than states: with Adam and float16 a sixth.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from torch import Tensor

from potluck import tasks
from potluck.errors import RoundFailedError
from potluck.optim.collaboration import Collaboration
from potluck.optim.method import Method

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_EVERY_SECONDS = 0.1
ROUND_SECONDS = 600.0  # how long to be ready for one epoch before saying so anew
# A line on which rounds take half of the time, with Adam and float16, brings a state within six epochs.
MOST_EPOCHS = 16


class Listener:
    """One peer's ear while it fetches. Lives on the event loop; nobody else may use the method meanwhile."""

    def __init__(self, method: Method, collaboration: Collaboration) -> None:
        self.averages: dict[int, dict[str, Tensor]] = {}
        """What was heard, by epoch."""
        self._method = method
        self._collaboration = collaboration
        self._is_last = False

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """Listen until this is done; a round that counts on this peer by then is heard to its end."""
        listening = asyncio.create_task(self._listen(), name="optimizer: listening")
        try:
            outcome = await work
            self._is_last = True
            while self._collaboration.is_in_round and not listening.done():
                # Looked at again and again: a round that is given up is no longer waited for, and if this peer is the
                # only one that trains, nobody else would begin another.
                await asyncio.wait([listening], timeout=LOOK_EVERY_SECONDS)
            return outcome
        finally:
            await tasks.end(listening)

    async def _listen(self) -> None:
        while not self._is_last:
            epoch = self._collaboration.epoch + 1
            tensors = self._method.blank(epoch).tensors
            try:
                result = await self._collaboration.average(
                    tensors, weight=0.0, epoch=epoch, reduces=False, timeout_seconds=ROUND_SECONDS
                )
            except RoundFailedError as error:
                logger.debug("epoch %d came to nothing while this peer listened: %s", epoch, error)
                continue
            if result.holds:
                self.averages[epoch] = tensors
                if len(self.averages) > MOST_EPOCHS:
                    del self.averages[min(self.averages)]
