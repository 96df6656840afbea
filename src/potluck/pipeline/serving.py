"""A stage's server: takes micro-batches, computes, hands on. The end of a step is in stepend.py.

    Forward ─▶ queue ─▶ compute thread ─▶ pusher ─▶ a server of the next stage
    Backward ─▶ queue (before forwards) ─▶ compute thread ─▶ the server that the forward came from

Which stages it serves, each attempt's Begin says. A machine that serves several consecutive ones has a `StageCompute`
for each, and one thread for all. It takes no more forwards than it has room for: what waits and what could not be
handed on yet counts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor

from potluck import tasks
from potluck.clock import Clock
from potluck.errors import PeerError, ProtocolError, RetryableError
from potluck.faultpoints import reach
from potluck.link.dispatch import Incoming
from potluck.link.links import Links
from potluck.pipeline.blocks import State
from potluck.pipeline.compute import Recompute, StageCompute
from potluck.pipeline.following import Following
from potluck.pipeline.holding import Holding
from potluck.pipeline.layout import Layout
from potluck.pipeline.messages import (
    Backward,
    Begin,
    Forward,
    Held,
    Looked,
    Lost,
    Pushed,
    Returned,
    Sent,
    StageIds,
)
from potluck.pipeline.pushing import HandOverError, Pusher
from potluck.pipeline.routing import RouterConfig
from potluck.pipeline.stepend import StepEnd
from potluck.pipeline.wire import check_codec, decode_tensors, encode_gradients, encode_tensors
from potluck.pipeline.witnessing import Witness

logger = logging.getLogger(__name__)

R = TypeVar("R")

RATE_SAMPLES, RATE_SECONDS = 32, 2.0  # of work behind a measured rate
FIRST, SECOND = 0, 1  # backward frees memory and lets others go on: it comes before forward


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What a server may hold, and how long it waits."""

    max_queue: int = 8
    """Micro-batches that wait to be computed, or to be handed on."""

    codec: str = "raw"
    """Of activations and their gradients."""

    recompute: Recompute = "auto"
    keep_bytes: int = 1 << 30
    """What graphs may take, where recomputation is automatic."""

    router: RouterConfig = field(default_factory=RouterConfig)
    """How many may be under way at a server of the next stage."""

    timeout_seconds: float = 600.0
    """For one hand-over or average; losses are found sooner, by the roster and by the conductor."""

    def __post_init__(self) -> None:
        check_codec(self.codec)
        if self.max_queue < 1:
            raise ValueError(f"max_queue={self.max_queue}: a server needs room for one micro-batch at least")


@dataclass(frozen=True, slots=True)
class _Passing:
    """A micro-batch that went through a stage here: where it came from."""

    sender: str
    samples: int
    adds: bool
    evaluates: bool
    shapes: tuple[torch.Size, ...]
    """Of its inputs: how long it takes goes by them."""


async def _nothing(begin: Begin) -> None:
    """Nobody wants to know."""


class StageServer:
    """One peer's stages."""

    def __init__(
        self,
        links: Links,
        clock: Clock,
        self_id: str,
        conductor: Following,
        holding: Holding,
        end: StepEnd,
        witness: Witness,
        config: ServerConfig | None = None,
        run_seed: int = 0,
    ) -> None:
        self._links = links
        self._clock = clock
        self._self_id = self_id
        self._conductor = conductor
        self._holding = holding
        self._run_seed = run_seed
        self._computes: dict[int, StageCompute] = {}
        self._starts: tuple[int, ...] = ()
        self._end = end
        end.contribution = lambda stage, unit: self._computes[stage].contribution(unit)
        self._witness = witness
        self._config = config or ServerConfig()
        self._pushers: dict[int, Pusher] = {}
        self._begun: Begin | None = None
        self._passing: dict[tuple[int, int], _Passing] = {}  # (stage, micro-batch) of this attempt
        self._unreachable: set[str] = set()
        self._jobs: asyncio.PriorityQueue[tuple[int, int, Callable[[], Coroutine[Any, Any, None]]]] = (
            asyncio.PriorityQueue()
        )
        self._order = count()
        self._waiting: set[tuple[int, int]] = set()  # (stage, micro-batch): not computed, or not handed on
        self._attempt_tasks: set[asyncio.Task[Any]] = set()
        self._worker: asyncio.Task[None] | None = None
        self.num_computed = 0
        self.busy_seconds = 0.0
        self.samples_done = 0
        self._rate = 0.0
        self.on_begin: Callable[[Begin], Coroutine[Any, Any, None]] = _nothing
        links.handle(Begin, self._begin)
        links.handle(Forward, self._forward)
        links.handle(Backward, self._backward)

    async def start(self) -> None:
        """Begin to work."""
        self._worker = asyncio.create_task(self._work(), name="pipeline-compute")

    async def close(self) -> None:
        """Stop. Idempotent."""
        for kind in (Begin, Forward, Backward):
            self._links.unhandle(kind)
        await tasks.end(self._worker, *self._attempt_tasks)

    @property
    def at_step(self) -> int:
        """How many steps are behind the state that this server holds."""
        return self._holding.step

    @property
    def stages(self) -> tuple[int, ...]:
        """Those that it serves in this attempt."""
        return tuple(self._computes)

    def rate(self) -> float:
        """Samples per second of computing in one stage, lately; 0: too few to tell."""
        if self.samples_done >= RATE_SAMPLES and self.busy_seconds > RATE_SECONDS:
            self._rate = self.samples_done / self.busy_seconds
            self.samples_done, self.busy_seconds = 0, 0.0
        return self._rate

    def statistics(self) -> dict[str, int]:
        """Counters."""
        return {"computed": self.num_computed, "waiting": len(self._waiting), "at_step": self.at_step}

    @property
    def num_waiting(self) -> int:
        """Micro-batches that are not computed yet, or not handed on."""
        return len(self._waiting)

    def sent(self) -> tuple[Sent, ...]:
        """What was handed on so far."""
        return tuple(
            Sent(server=server, stage=stage, count=count)
            for stage, pusher in self._pushers.items()
            for server, count in pusher.sent.items()
        )

    # The fence

    async def _begin(self, incoming: Incoming[Begin]) -> Held | None:
        begin = incoming.message
        if not await self._conductor.accepts(incoming.sender):
            raise ProtocolError("only the conductor begins a step")
        current = self._begun
        if (
            current is not None
            and current.life == begin.life
            and (begin.step, begin.attempt) <= (current.step, current.attempt)
        ):
            raise ProtocolError(f"attempt {begin.attempt} of step {begin.step} is over")
        await self._end.catch_up(begin.life, begin.last)
        if begin.life == self._holding.life:
            await self._holding.advance(begin.step)
        is_new_step = current is None or begin.step != current.step or begin.life != current.life
        self._begun = begin
        self._witness.begin(begin.step, begin.checks, is_on=begin.are_checked)
        self._passing.clear()
        self._waiting.clear()
        if is_new_step:
            self._unreachable.clear()
        for task in self._attempt_tasks:
            task.cancel()
        self._serve(begin)
        self._end.begin(begin, self._computes)
        for stage, pusher in self._pushers.items():
            pusher.forget_tasks()
            pusher.set_servers(begin.servers[stage], unreachable=frozenset(self._unreachable))
        held = [
            StageIds(stage=stage, ids=tuple(added), losses=tuple(added.values()) if compute.is_last else ())
            for stage, compute in self._computes.items()
            for added in [compute.fence(begin.step, begin.attempt, begin.valid_from)]
        ]
        await self.on_begin(begin)
        standing = self._holding.standing if begin.life == self._holding.life else ()
        return Held(at_step=self.at_step, standing=standing, held=tuple(held))

    def _serve(self, begin: Begin) -> None:
        """Be ready for the stages that the conductor counts on us for, as far as their blocks stand here."""
        if begin.starts != self._starts:
            self._starts, self._computes, self._pushers = begin.starts, {}, {}
            self._holding.thread.forget()
        blueprint, blocks = self._holding.blueprint, self._holding.blocks
        stages = Layout(blueprint.num_blocks, begin.starts).stages
        served = [stage for stage, names in enumerate(begin.servers) if self._self_id in names]
        old = self._computes
        self._computes = {}
        for stage in served:
            if begin.step != self.at_step or not self._holding.stands(stages[stage]):
                continue
            known = old.get(stage)
            if known is not None and all(known.blocks[number] is blocks[number] for number in stages[stage]):
                self._computes[stage] = known
                continue
            self._computes[stage] = StageCompute(
                stage=stage,
                stages=stages,
                blocks={number: blocks[number] for number in stages[stage]},
                ties=blueprint.ties,
                num_blocks=blueprint.num_blocks,
                run_seed=self._run_seed,
                recompute=self._config.recompute,
                keep_bytes=self._config.keep_bytes,
            )
        wanted = [stage + 1 for stage, compute in self._computes.items() if not compute.is_last]
        self._pushers = {stage: self._pushers.get(stage) or self._pusher() for stage in wanted}

    def _pusher(self) -> Pusher:
        return Pusher(self._links, self._clock, self._config.router, timeout_seconds=self._config.timeout_seconds)

    def _is_current(self, step: int, attempt: int) -> bool:
        begun = self._begun
        return begun is not None and (begun.step, begun.attempt) == (step, attempt)

    # Forward

    async def _forward(self, incoming: Incoming[Forward]) -> Pushed:
        message = incoming.message
        compute = self._computes.get(message.stage)
        if compute is None:
            raise ProtocolError(f"stage {message.stage} is not served here")
        if not self._is_current(message.step, message.attempt) or (message.stage, message.id) in self._passing:
            return Pushed(answer="stale")
        if len(self._waiting) >= self._config.max_queue:
            return Pushed(answer="busy")
        tensors = decode_tensors(message.tensors, incoming.frames, compute.device)
        inputs = tuple(
            tensor.requires_grad_(spec.needs_grad) if tensor.is_floating_point() else tensor
            for tensor, spec in zip(tensors, message.tensors, strict=True)
        )
        if not message.evaluates:
            attempt, frames = message.attempt, incoming.frames
            self._witness.note("input", message.stage, attempt, message.id, frames)
            if message.stage > 0:
                before = message.stage - 1
                self._witness.testify("output", incoming.sender, before, attempt, message.id, message.tensors, frames)
        incoming.release()
        self._passing[message.stage, message.id] = _Passing(
            incoming.sender,
            message.samples,
            message.stage not in message.held_by,
            message.evaluates,
            tuple(tensor.shape for tensor in inputs),
        )
        self._waiting.add((message.stage, message.id))
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        async def job() -> None:
            await self._compute_forward(compute, message, inputs, done)

        reach("pipeline.queued", step=message.step, stage=message.stage, micro=message.id)
        self._jobs.put_nowait((SECOND, next(self._order), job))
        return Pushed(answer="done" if await done else "stale")

    async def _compute_forward(
        self, compute: StageCompute, message: Forward, inputs: State, done: asyncio.Future[bool]
    ) -> None:
        key = (message.attempt, message.id)
        outputs = None
        try:
            if not self._is_current(message.step, message.attempt):
                pass
            elif message.evaluates:
                outputs = await self._holding.thread.run(lambda: compute.look(message.step, message.id, inputs))
            else:
                outputs = await self._computed(
                    ("forward", message.stage, *(tensor.shape for tensor in inputs)),
                    lambda: compute.forward(message.step, key, inputs),
                )
                self.num_computed += 1
        finally:
            if not done.done():
                done.set_result(outputs is not None)
        if outputs is None:
            return
        reach("pipeline.forwarded", step=message.step, stage=message.stage, micro=message.id)
        if not self._is_current(message.step, message.attempt):
            return
        if compute.is_last and message.evaluates:
            self._waiting.discard((message.stage, message.id))
            self._spawn(self._tell_loss(message.stage, message.step, message.attempt, message.id, outputs[0].item()))
        elif compute.is_last:
            self._waiting.discard((message.stage, message.id))
            assert self._begun is not None
            seed = torch.full_like(outputs[0], self._begun.loss_scale)
            await self._compute_backward(compute, message.step, message.attempt, message.id, (seed,), outputs[0].item())
        else:
            self._spawn(self._hand_on(message, outputs))

    async def _hand_on(self, message: Forward, outputs: State) -> None:
        try:
            specs, frames = encode_tensors(outputs, self._config.codec)
            onward = Forward(
                step=message.step,
                attempt=message.attempt,
                id=message.id,
                stage=message.stage + 1,
                samples=message.samples,
                held_by=message.held_by,
                tensors=specs,
                evaluates=message.evaluates,
            )
            if not message.evaluates:
                self._witness.note("output", message.stage, message.attempt, message.id, frames)
            server = await self._pushers[message.stage + 1].push(onward, frames)
            if server is not None and not message.evaluates:
                self._witness.testify(
                    "input", server, onward.stage, message.attempt, message.id, specs, frames, samples=message.samples
                )
                reach("pipeline.between", step=message.step, stage=message.stage, micro=message.id)
            self._waiting.discard((message.stage, message.id))
        except HandOverError as error:
            await self._tell_lost(message.step, message.attempt, error.peer, error.reason)

    # Backward

    async def _backward(self, incoming: Incoming[Backward]) -> None:
        message = incoming.message
        compute = self._computes.get(message.stage)
        passing = self._passing.get((message.stage, message.id))
        if compute is None or passing is None or not self._is_current(message.step, message.attempt):
            return  # of an attempt that is over
        if passing.evaluates:
            self._spawn(self._tell_loss(message.stage, message.step, message.attempt, message.id, message.loss))
            return
        attempt, frames, after = message.attempt, incoming.frames, message.stage + 1
        gradients = tuple(decode_tensors(message.tensors, frames, compute.device))
        self._witness.note("output gradient", message.stage, attempt, message.id, frames)
        self._witness.testify(
            "input gradient", incoming.sender, after, attempt, message.id, message.tensors, frames, loss=message.loss
        )

        async def job() -> None:
            await self._compute_backward(compute, message.step, message.attempt, message.id, gradients, message.loss)

        self._jobs.put_nowait((FIRST, next(self._order), job))

    async def _compute_backward(
        self,
        compute: StageCompute,
        step: int,
        attempt: int,
        micro: int,
        gradients: tuple[Tensor, ...],
        loss: float,
    ) -> None:
        passing = self._passing.get((compute.stage, micro))
        if passing is None or not self._is_current(step, attempt):
            return
        reach("pipeline.backward", step=step, stage=compute.stage, micro=micro)
        weight = float(passing.samples)
        found = await self._computed(
            ("backward", compute.stage, *passing.shapes),
            lambda: compute.backward(step, (attempt, micro), gradients, weight=weight, adds=passing.adds, loss=loss),
        )
        if found is None:
            return
        self.samples_done += passing.samples
        reach("pipeline.added", step=step, stage=compute.stage, micro=micro)
        self._spawn(self._hand_back(compute.stage, step, attempt, micro, passing.sender, found, loss))

    async def _hand_back(
        self, stage: int, step: int, attempt: int, micro: int, peer: str, gradients: tuple[Tensor, ...], loss: float
    ) -> None:
        message: Backward | Returned = Returned(step=step, attempt=attempt, id=micro, loss=loss)
        frames: list[memoryview] = []
        if stage > 0:
            specs, frames = encode_gradients(gradients, self._config.codec)
            message = Backward(step=step, attempt=attempt, id=micro, stage=stage - 1, loss=loss, tensors=specs)
            self._witness.note("input gradient", stage, attempt, micro, frames)
            self._witness.testify("output gradient", peer, stage - 1, attempt, micro, specs, frames, loss=loss)
        try:
            receipt = await self._links.send(
                peer, message, frames, timeout_seconds=self._config.timeout_seconds, bulk=True
            )
            await receipt.wait(timeout_seconds=self._config.timeout_seconds)
        except (PeerError, RetryableError) as error:
            await self._tell_lost(step, attempt, peer, str(error))

    async def _tell_loss(self, stage: int, step: int, attempt: int, micro: int, loss: float) -> None:
        """Of a held-out micro-batch: back along the way that it came."""
        passing = self._passing.get((stage, micro))
        if passing is None or not self._is_current(step, attempt):
            return
        message: Backward | Looked = Looked(step=step, attempt=attempt, id=micro, loss=loss)
        if stage > 0:
            message = Backward(step=step, attempt=attempt, id=micro, stage=stage - 1, loss=loss, tensors=())
        try:
            await self._links.send(passing.sender, message, timeout_seconds=self._config.timeout_seconds)
        except (PeerError, RetryableError) as error:
            logger.info("%s does not hear of a held-out loss: %s", passing.sender, error)

    async def _tell_lost(self, step: int, attempt: int, peer: str, reason: str) -> None:
        if peer:
            self._unreachable.add(peer)
        lost = Lost(step=step, attempt=attempt, peer=peer, reason=reason[:500])
        try:
            await self._links.send(self._conductor.peer, lost, timeout_seconds=self._config.timeout_seconds)
        except (PeerError, RetryableError) as error:
            logger.warning("the conductor cannot be told that %s is lost: %s", peer, error)

    # Work

    async def _work(self) -> None:
        while True:
            _, _, job = await self._jobs.get()
            try:
                await job()
            except (
                Exception
            ) as error:  # a model's own error ends here: the conductor hears of it, and gives up in the end
                logger.exception("a micro-batch failed")
                if self._begun is not None:
                    reason = f"{type(error).__name__}: {error}"
                    self._spawn(self._tell_lost(self._begun.step, self._begun.attempt, "", reason))

    async def _computed(self, kind: Hashable, work: Callable[[], R]) -> R:
        def timed() -> R:
            started = time.perf_counter()
            try:
                return work()
            finally:
                self.busy_seconds += time.perf_counter() - started

        return await self._holding.thread.run_often(kind, timed)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._attempt_tasks.add(task)
        task.add_done_callback(self._attempt_tasks.discard)
