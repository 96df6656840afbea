"""Hearing the epochs that pass while the state before them is on its way.

A state that takes longer to fetch than an epoch lasts is outdated when it comes, and so would the next one be: such a
peer would never get in. So it takes part meanwhile, without weight: others do not wait for its samples, it averages for
nobody, and the averages that it hears are put on the state when that is here (`Recovery`). It then does what all others
have done, to the same bits. Averages are much smaller than states: with Adam and float16 a sixth.

It listens until it can train: a round that began while the state is loaded, or earlier ones are put on it, would be
missed otherwise, and a whole state more be fetched for it. With shared batches it goes on until its first batch is
computed, which takes longer than later ones (`Recovery.hear_out`); that batch is lost if an epoch passes meanwhile, and
no state is fetched for it. An epoch that passes all the same without its being heard,
as one does whose round had begun before this peer came, makes every state from before it useless: then the fetch begins
anew at once, and not when all of the useless state has come.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import torch
from torch import Tensor

from potluck import tasks
from potluck.errors import RoundFailedError
from potluck.optim.method import Method
from potluck.round.averager import Averager

logger = logging.getLogger(__name__)

LOOK_EVERY_SECONDS = 0.1
ROUND_SECONDS = 600.0  # how long to be ready for one epoch before saying so anew
# A line of which rounds take two thirds, with Adam and float16, brings a state within twelve epochs; two states that
# are loaded at the same time take twice as long.
MOST_EPOCHS = 16
MOST_BYTES = 1024**3  # more epochs than that are remembered while they fit in here
MOST_STARTS = 4  # of one fetch: whoever hears nothing at all may be lucky after all when a state has come

T = TypeVar("T")


class EpochListener:
    """One peer's ear while it fetches. Lives on the event loop, but for what is said otherwise."""

    def __init__(self, method: Method, averager: Averager) -> None:
        self.averages: dict[int, dict[str, Tensor]] = {}
        """What was heard, by epoch. Any thread may look an epoch up."""
        self.turn = threading.Lock()
        """Held by whoever uses the method while somebody listens: it is asked here what averages look like."""
        self._method = method
        self._averager = averager
        self._epoch = 0  # that is listened for
        self._tensors: dict[str, Tensor] = {}  # for its averages
        self._is_last = False
        self._has_missed = asyncio.Event()
        self._listening: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen from now on."""
        self._listening = asyncio.create_task(self._listen(), name="optimizer: listening")

    async def meanwhile(self, fetch: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What is fetched; begun anew when an epoch passes that this peer does not hear."""
        for _ in range(MOST_STARTS - 1):
            self._has_missed.clear()
            fetching = asyncio.create_task(fetch(), name="optimizer: fetch")
            missing = asyncio.create_task(self._has_missed.wait(), name="optimizer: epochs missed")
            try:
                await asyncio.wait([fetching, missing], return_when=asyncio.FIRST_COMPLETED)
                if fetching.done():
                    return fetching.result()
            finally:
                await tasks.end(missing, *([] if fetching.done() else [fetching]))
            logger.info("epoch %d passed before this peer could hear it: the fetch begins anew", self._epoch - 1)
        return await fetch()

    async def finish(self) -> None:
        """Listen to no more rounds; one that counts on this peer by now is heard to its end."""
        assert self._listening is not None, "started before"
        self._is_last = True
        while self._is_counted_on and not self._listening.done():
            # Looked at again and again: a round that is given up is no longer waited for, and if this peer is the
            # only one that trains, nobody else would begin another.
            await asyncio.wait([self._listening], timeout=LOOK_EVERY_SECONDS)
        await self.close()

    async def close(self) -> None:
        """Stop listening, whatever is under way. Idempotent."""
        await tasks.end(self._listening)

    @property
    def _is_counted_on(self) -> bool:
        """Whether a round is under way that this peer is in, or is over and its averages are about to be here."""
        return self._averager.is_in_round or self._averager.epoch >= self._epoch

    async def _listen(self) -> None:
        while not self._is_last:
            if self._epoch not in self.averages and 0 < self._epoch <= self._averager.epoch:
                self._has_missed.set()
            epoch = self._epoch = self._averager.epoch + 1
            await tasks.finish([self._make_room(epoch)])  # whoever stops listening has the method for itself
            tensors, self._tensors = self._tensors, {}
            try:
                result = await self._averager.average(
                    tensors, weight=0.0, epoch=epoch, reduces=False, timeout_seconds=ROUND_SECONDS
                )
            except RoundFailedError as error:
                logger.debug("epoch %d came to nothing while this peer listened: %s", epoch, error)
                continue
            if result.holds:
                self.averages[epoch] = tensors
                num_bytes = sum(tensor.nbytes for tensor in tensors.values())
                if len(self.averages) > max(MOST_EPOCHS, MOST_BYTES // max(num_bytes, 1)):
                    del self.averages[min(self.averages)]

    async def _make_room(self, epoch: int) -> None:
        def make() -> dict[str, Tensor]:
            with self.turn:  # in a worker: the training thread may be in the middle of a step
                blank = self._method.blank(epoch).tensors
            # In the memory of the CPU: sixteen epochs of gradients would fill that of many a GPU.
            return {
                name: tensor if tensor.device.type == "cpu" else torch.zeros_like(tensor, device="cpu")
                for name, tensor in blank.items()
            }

        self._tensors = await self._averager.work(make)
