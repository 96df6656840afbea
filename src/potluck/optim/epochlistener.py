"""Hearing the epochs that pass while the state before them is on its way.

A state that takes longer to fetch than an epoch lasts is outdated when it comes, and so would the next one be: such a
peer would never get in. So it takes part meanwhile, without weight: others do not wait for its samples, it averages for
nobody, and the averages that it hears are put on the state when that is here (`Recovery`). It then does what all others
have done, to the same bits. Averages are much smaller than states: with Adam and float16 a sixth.

It listens until it can train: a round that began while the state is loaded, or earlier ones are put on it, would be
missed otherwise. With shared batches it goes on until its first batch is computed, which takes longer than later ones
(`Recovery.hear_out`); that batch is lost if an epoch passes meanwhile, and no state is fetched for it.

An epoch may pass all the same without its being heard, as one does whose round had begun before this peer came, or
which others did not wait with for this peer's slow line. Then its averages are asked for afterwards
(round/member/lateaverages.py). Only if nobody has them is every state from before that epoch useless; then the fetch
begins anew at once, and not when all of the useless state has come.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from potluck import tasks
from potluck.errors import RetryableError, RoundFailedError
from potluck.optim.method import Method
from potluck.round.averager import Averager

logger = logging.getLogger(__name__)

LOOK_EVERY_SECONDS = 0.1
ROUND_SECONDS = 600.0  # how long to be ready for one epoch before saying so anew
# A line of which rounds take two thirds, with Adam and float16, brings a state within twelve epochs; two states that
# are loaded at the same time take twice as long.
MOST_EPOCHS = 16
MOST_BYTES = 1024**3  # more epochs than that are remembered while they fit in here
MOST_STARTS = 4  # of one fetch: a peer that hears nothing at all may be lucky later, when a state has come

T = TypeVar("T")


class EpochListener:
    """One peer's ear while it fetches. Lives on the event loop, but for what is said otherwise."""

    def __init__(self, method: Method, averager: Averager) -> None:
        self.averages: dict[int, dict[str, Tensor]] = {}
        """What was heard, by epoch. Any thread may look an epoch up."""
        self.turn = threading.Lock()
        """Held by the user of the method while somebody listens: it is asked here what averages look like."""
        self._method = method
        self._averager = averager
        self._epoch = 0  # that is listened for
        self._is_last = False
        self._has_missed = asyncio.Event()
        self._listening: asyncio.Task[None] | None = None
        self._missed: dict[int, asyncio.Task[None]] = {}  # epochs whose averages are asked for afterwards
        self._asking = asyncio.Semaphore(1)

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
            logger.info("the fetch of the run's state begins anew")
        return await fetch()

    async def finish(self) -> None:
        """Listen to no more rounds; one that counts on this peer by now is heard to its end, and so are missed ones."""
        assert self._listening is not None, "started before"
        self._is_last = True
        while self._is_counted_on and not self._listening.done():
            # Looked at again and again: a round that is given up is no longer waited for, and if this peer is the
            # only one that trains, nobody else would begin another.
            await asyncio.wait([self._listening], timeout=LOOK_EVERY_SECONDS)
        if self._missed:
            await asyncio.wait(self._missed.values())
        await self.close()

    async def close(self) -> None:
        """Stop listening, whatever is under way. Idempotent."""
        await tasks.end(self._listening, *self._missed.values())

    @property
    def _is_counted_on(self) -> bool:
        """Whether a round is under way that this peer is in, or is over and its averages are about to be here."""
        return self._averager.is_in_round or self._averager.epoch >= self._epoch

    async def _listen(self) -> None:
        while not self._is_last:
            head = self._averager.epoch
            if self._epoch:
                self._ask_for(epoch for epoch in range(self._epoch, head + 1) if epoch not in self.averages)
            epoch = self._epoch = head + 1
            (tensors,) = await tasks.finish([self._room_for(epoch)])  # then the caller has the method for itself
            try:
                result = await self._averager.average(
                    tensors, weight=0.0, epoch=epoch, reduces=False, timeout_seconds=ROUND_SECONDS
                )
            except RoundFailedError as error:
                logger.debug("epoch %d came to nothing while this peer listened: %s", epoch, error)
                continue
            if result.holds:
                self._heard(epoch, tensors)

    def _heard(self, epoch: int, tensors: dict[str, Tensor]) -> None:
        self.averages[epoch] = tensors
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        if len(self.averages) > max(MOST_EPOCHS, MOST_BYTES // max(num_bytes, 1)):
            del self.averages[min(self.averages)]

    def _ask_for(self, epochs: Iterable[int]) -> None:
        for epoch in epochs:
            if epoch not in self._missed:
                self._missed[epoch] = asyncio.create_task(self._hear_late(epoch), name="optimizer: missed epoch")

    async def _hear_late(self, epoch: int) -> None:
        async with self._asking:  # one after the other, as they are needed
            (tensors,) = await tasks.finish([self._room_for(epoch)])
            try:
                await self._averager.hear_late(tensors, epoch=epoch)
            except RetryableError as error:
                logger.info("epoch %d passed before this peer could hear it: %s", epoch, error)
                self._has_missed.set()
            else:
                self._heard(epoch, tensors)

    async def _room_for(self, epoch: int) -> dict[str, Tensor]:
        def make() -> dict[str, Tensor]:
            with self.turn:  # in a worker: the training thread may be in the middle of a step
                return room_for(self._method, epoch)

        return await self._averager.work(make)


def room_for(method: Method, epoch: int) -> dict[str, Tensor]:
    """Tensors for the averages of an epoch, in the CPU's memory: sixteen epochs would fill that of many a GPU."""
    blank = method.blank(epoch).tensors
    return {
        name: tensor if tensor.device.type == "cpu" else torch.zeros_like(tensor, device="cpu")
        for name, tensor in blank.items()
    }
