"""Handing messages to their handlers, in order, within limits.

A handler is a function of one Incoming, plain or async. Handlers of one peer's messages *start* in the order in which
the messages were sent; async ones then run side by side, at most `max_handlers` per peer. A message counts against its
sender's credit until its handler has finished, or has said `incoming.release()`: a handler that asks the sender
something back should do so, or each could wait for the other's credit.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from potluck.errors import ConfigurationError, PotluckError, ProtocolError, RetryableError
from potluck.link.carrier import Buffer
from potluck.link.channel.packet import Urgency
from potluck.link.counters import Counters
from potluck.link.envelope import Envelope, MessageRole, route
from potluck.link.limits import LinkConfig
from potluck.messages import Message, decode
from potluck.tasks import end

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)
Answer = Message | tuple[Message, Sequence[Buffer]] | None


@dataclass(slots=True)
class Incoming(Generic[M]):
    """A message that arrived. Its frames are views that nobody else writes to; a copy is only needed to change them."""

    sender: str
    message: M
    frames: list[memoryview]
    timeout_seconds: float | None = None  # requests: how long the asker waits, to be passed on
    _release: Callable[[], None] = field(default=lambda: None, repr=False)

    def release(self) -> None:
        """Give the sender its credit back now rather than when the handler has finished."""
        self._release()


Handler = Callable[[Incoming[M]], Answer | Awaitable[Answer]]
# Sends the answer to a request, or the error instead of one.
Respond = Callable[[str, Envelope, Urgency, Answer | Exception], Awaitable[None]]


class Arrived:
    """A message on its way to a handler; `release` gives the sender's credit back."""

    __slots__ = ("counters", "envelope", "frames", "release", "sender", "urgency")

    def __init__(
        self,
        sender: str,
        envelope: Envelope,
        frames: list[memoryview],
        urgency: Urgency,
        release: Callable[[], None],
        counters: Counters,
    ) -> None:
        self.sender = sender
        self.envelope = envelope
        self.frames = frames
        self.urgency = urgency
        self.release = release
        self.counters = counters


@dataclass(slots=True)
class _Registration:
    kind: type[Message]
    handler: Handler[Any]
    is_async: bool  # asked once, not with each message


def _raiser(error: Exception) -> Handler[Any]:
    def fail(incoming: Incoming[Any]) -> Answer:
        raise error

    return fail


class _PeerWork:
    """What is being handled for one peer, and what waits."""

    __slots__ = ("num_started", "waiting")

    def __init__(self) -> None:
        self.num_started = 0
        self.waiting: deque[tuple[_Registration, Arrived, Message]] = deque()


class Dispatcher:
    """The handlers of this peer."""

    def __init__(self, config: LinkConfig, respond: Respond) -> None:
        self._max_handlers = config.max_handlers
        self._respond = respond
        self._registrations: dict[str, _Registration] = {}
        self._work: dict[str, _PeerWork] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._closed = False

    def register(self, kind: type[M], handler: Handler[M], group: str = "") -> None:
        """Have messages of that kind and group handled so; there is one handler for each."""
        tag = route(kind, group)
        if tag in self._registrations:
            raise ConfigurationError(f"messages of kind {tag} have a handler already: give the new kind another tag")
        self._registrations[tag] = _Registration(kind, handler, inspect.iscoroutinefunction(handler))

    def unregister(self, kind: type[Message], group: str = "") -> None:
        """Handle no more messages of that kind and group."""
        self._registrations.pop(route(kind, group), None)

    def take(self, arrived: Arrived) -> None:
        """A message or a request has come; messages of one peer come here in order."""
        envelope = arrived.envelope
        registration = self._registrations.get(envelope.kind)
        if registration is None:
            arrived.counters.unknown_kinds += 1
            error = ProtocolError(f"nobody handles {envelope.kind[:100]!r} here: is this peer's version older?")
            self._refuse(arrived, error)
            return
        try:
            message = decode(registration.kind, envelope.body)
        except ProtocolError as error:
            arrived.counters.malformed += 1
            self._refuse(arrived, error)
            return
        self._queue(arrived, registration, message)

    def _refuse(self, arrived: Arrived, error: ProtocolError) -> None:
        if arrived.envelope.role == MessageRole.REQUEST:
            # Answered like any other, within the same limits: a peer that asks nonsense and takes no answer must wait.
            self._queue(arrived, _Registration(Message, _raiser(error), is_async=False), Message())
        else:
            arrived.release()

    def _queue(self, arrived: Arrived, registration: _Registration, message: Message) -> None:
        work = self._work.get(arrived.sender)
        if work is None:
            work = self._work[arrived.sender] = _PeerWork()
        work.waiting.append((registration, arrived, message))
        self._start(arrived.sender, work)

    def _start(self, sender: str, work: _PeerWork) -> None:
        while work.waiting and work.num_started < self._max_handlers and not self._closed:
            registration, arrived, message = work.waiting.popleft()
            handler = registration.handler
            is_request = arrived.envelope.role == MessageRole.REQUEST
            patience = arrived.envelope.seconds if is_request else None
            incoming = Incoming(sender, message, arrived.frames, patience, arrived.release)
            if is_request or registration.is_async or work.num_started:
                # Tasks start in the order in which they are made; so a plain handler behind them becomes one too.
                work.num_started += 1
                self._spawn(self._run(handler, incoming, arrived, work))
            else:
                self._run_plain(handler, incoming, arrived, work)
        if not work.num_started and not work.waiting:
            self._work.pop(sender, None)

    def _run_plain(self, handler: Handler[Any], incoming: Incoming[Any], arrived: Arrived, work: _PeerWork) -> None:
        try:
            result = handler(incoming)
        except Exception as error:  # noqa: BLE001 - the application's handler must not stop the link; logged and counted
            self._log_failure(arrived, error)
        else:
            if result is not None and inspect.isawaitable(result):
                work.num_started += 1
                self._spawn(self._run(lambda _: result, incoming, arrived, work))
                return
        arrived.release()

    async def _run(self, handler: Handler[Any], incoming: Incoming[Any], arrived: Arrived, work: _PeerWork) -> None:
        try:
            answer = await self._call(handler, incoming, arrived)
            if arrived.envelope.role == MessageRole.REQUEST:
                await self._respond(arrived.sender, arrived.envelope, arrived.urgency, answer)
        finally:
            arrived.release()
            work.num_started -= 1
            self._start(arrived.sender, work)

    async def _call(self, handler: Handler[Any], incoming: Incoming[Any], arrived: Arrived) -> Answer | Exception:
        try:
            async with asyncio.timeout(incoming.timeout_seconds):
                result = handler(incoming)
                return await result if inspect.isawaitable(result) else result
        except Exception as error:  # noqa: BLE001 - the application's handler must not stop the link; logged, counted
            if arrived.envelope.role != MessageRole.REQUEST or not isinstance(error, PotluckError):
                self._log_failure(arrived, error)  # an error of ours in a request is its answer
            return error

    def _log_failure(self, arrived: Arrived, error: Exception) -> None:
        arrived.counters.handler_errors += 1
        if isinstance(error, (RetryableError, TimeoutError)):  # no bug: the hub is away, or this process stood still
            why = str(error) or "it took longer than the asker waits"
            logger.warning("the handler of %s from %s gave up: %s", arrived.envelope.kind, arrived.sender, why)
        else:
            logger.error("the handler of %s from %s failed", arrived.envelope.kind, arrived.sender, exc_info=error)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("answering a request failed", exc_info=error)

    async def close(self) -> None:
        """End all handlers; what waits for one is dropped."""
        self._closed = True
        await end(*self._tasks)
