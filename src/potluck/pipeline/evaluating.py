"""Evaluation through the pipeline while it trains: held-out data go forward through the servers, and change nothing.

Weights do not change within a step. So held-out micro-batches travel between those of a step, under ids that the step
does not have. Stages compute them in evaluation mode, and the loss comes back along the same servers. The conductor
asks for an evaluation at a step's beginning, and commits when it is over. An attempt that ends takes its evaluation
along: it is made in a later one.

    Evaluations   the conductor's: when, and in which attempt
    Evaluator     the peer's that has held-out data
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from potluck.clock import Clock
from potluck.errors import PotluckError, StateUnavailableError
from potluck.link.dispatch import Incoming
from potluck.link.links import Links
from potluck.pipeline.blocks import State
from potluck.pipeline.following import Following
from potluck.pipeline.messages import MAX_MICRO_BATCHES, Evaluate, Evaluated, Forward, Looked
from potluck.pipeline.pushing import Pusher
from potluck.pipeline.roll import Roll, RunState
from potluck.pipeline.routing import RouterConfig
from potluck.pipeline.stepping import StepRunner
from potluck.pipeline.wire import RAW, encode_tensors

logger = logging.getLogger(__name__)

IN_FLIGHT = 4
DEFAULT_EVERY = 100  # steps between two evaluations

LossOf = Callable[[State], float]
"""The mean loss of a batch by the model as it is now. For a thread: it waits."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a peer evaluates, and how often."""

    figures: Callable[[LossOf], Mapping[str, float]]
    """All figures of the held-out data; called in a thread."""
    every_steps: int = DEFAULT_EVERY
    on_figures: Callable[[int, Mapping[str, float]], None] = lambda step, figures: None


class Evaluations:
    """One conductor's. Lives on the event loop."""

    def __init__(self, links: Links, roll: Roll, state: RunState, runner: StepRunner, *, seconds: float) -> None:
        """`seconds`: that a commit waits at most."""
        self._links = links
        self._roll = roll
        self._state = state
        self._runner = runner
        self._seconds = seconds
        self._made_at = -1  # the step of the last one
        self._running: asyncio.Task[None] | None = None

    def fenced(self) -> None:
        """An attempt's members have all answered: an evaluation that is due begins."""
        self.stop()
        step = self._state.record.step
        for name, peer in self._roll.peers.items():
            every = peer.offer.evaluates_every
            if every and step >= max(self._made_at + every, 1):
                self._running = asyncio.create_task(self._make(name, step), name="pipeline-evaluate")
                return

    def stop(self) -> None:
        """Somebody is gone, or the step is over: its micro-batches may never come back."""
        if self._running is not None:
            self._running.cancel()
            self._running = None

    async def until_over(self) -> None:
        """Before a commit: return when no evaluation needs this step's weights any more."""
        if self._running is not None:
            await asyncio.wait([self._running])

    async def _make(self, name: str, step: int) -> None:
        attempt, servers, samples = self._runner.under_way
        ask = Evaluate(step=step, attempt=attempt, servers=servers, micro_batch=max(samples), seconds=self._seconds)
        try:
            answer = await self._links.request(name, ask, reply=Evaluated, timeout_seconds=self._seconds)
            trouble = answer.message.trouble
        except PotluckError as error:
            trouble = str(error)
        if trouble:
            self._roll.on_event("not evaluated", {"step": step, "reason": trouble})
        self._made_at = step


class Evaluator:
    """One peer's evaluations. Lives on the event loop."""

    def __init__(self, links: Links, clock: Clock, conductor: Following, evaluation: Evaluation) -> None:
        self._links = links
        self._conductor = conductor
        self._evaluation = evaluation
        self._clock = clock
        self._order: Evaluate | None = None
        self._waiting: dict[int, asyncio.Future[float]] = {}
        self._next_id = MAX_MICRO_BATCHES
        links.handle(Evaluate, self._evaluate)
        links.handle(Looked, self._looked)

    def close(self) -> None:
        """Evaluate no more. Idempotent."""
        self._links.unhandle(Evaluate)
        self._links.unhandle(Looked)
        self._forget("this peer leaves")

    def _forget(self, reason: str) -> None:
        self._order = None
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(StateUnavailableError(reason))
                future.exception()  # it may be that nobody waits for it any more
        self._waiting.clear()

    async def _evaluate(self, incoming: Incoming[Evaluate]) -> Evaluated:
        order = incoming.message
        if not await self._conductor.accepts(incoming.sender):
            return Evaluated(trouble="only the conductor asks for that")
        self._forget("another attempt has begun")
        self._order, self._next_id = order, MAX_MICRO_BATCHES
        pusher = Pusher(self._links, self._clock, RouterConfig(), timeout_seconds=order.seconds)
        pusher.set_servers(order.servers)
        loop, room = asyncio.get_running_loop(), asyncio.Semaphore(IN_FLIGHT)

        def loss_of(batch: State) -> float:
            work = self._mean_loss(order, pusher, room, batch)
            return asyncio.run_coroutine_threadsafe(work, loop).result()

        try:
            async with asyncio.timeout(order.seconds):
                figures = await asyncio.to_thread(self._evaluation.figures, loss_of)
        except (PotluckError, TimeoutError) as error:
            return Evaluated(trouble=str(error)[:500] or f"it took longer than {order.seconds:g} s")
        except Exception as error:  # a recipe may do anything; the run goes on without its figures
            logger.exception("the evaluation of step %d failed", order.step)
            return Evaluated(trouble=f"{type(error).__name__}: {error}"[:500])
        finally:
            if self._order is order:
                self._forget("the evaluation is over")
        self._evaluation.on_figures(order.step, figures)
        return Evaluated()

    async def _mean_loss(self, order: Evaluate, pusher: Pusher, room: asyncio.Semaphore, batch: State) -> float:
        """Of a batch, in pieces as large as the step's micro-batches."""
        total = len(batch[0])
        starts = range(0, total, order.micro_batch)
        pieces = [tuple(tensor[start : start + order.micro_batch] for tensor in batch) for start in starts]

        async def one(piece: State) -> float:
            async with room:
                return await self._loss(order, pusher, piece)

        losses = await asyncio.gather(*map(one, pieces))
        return sum(loss * len(piece[0]) for loss, piece in zip(losses, pieces, strict=True)) / total

    async def _loss(self, order: Evaluate, pusher: Pusher, piece: State) -> float:
        if self._order is not order:
            raise StateUnavailableError("the step was begun anew")
        self._next_id -= 1
        number, samples = self._next_id, len(piece[0])
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        specs, frames = encode_tensors(piece, RAW)
        message = Forward(
            step=order.step,
            attempt=order.attempt,
            id=number,
            stage=0,
            samples=samples,
            held_by=(),
            tensors=specs,
            evaluates=True,
        )
        if await pusher.push(message, frames) is None:
            raise StateUnavailableError("the step was begun anew")
        return float(await future)

    def _looked(self, incoming: Incoming[Looked]) -> None:
        looked, order = incoming.message, self._order
        if order is None or (looked.step, looked.attempt) != (order.step, order.attempt):
            return
        future = self._waiting.pop(looked.id, None)
        if future is not None and not future.done():
            future.set_result(looked.loss)
