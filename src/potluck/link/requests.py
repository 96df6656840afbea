"""Questions and answers over links.

A request has a number; its reply, or the failure that comes instead, carries the same. The asker waits until its
deadline, or until the peer's channel is gone. A handler's errors reach the asker as errors of the same kind where they
are ours and say something that the asker can act on; of any other error only the fact is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import TypeVar

from potluck.errors import (
    ConfigurationError,
    DeadlineExceededError,
    PeerError,
    PeerUnreachableError,
    PermissionDeniedError,
    PotluckError,
    ProtocolError,
    RetryableError,
    RevisionConflictError,
)
from potluck.link.carrier import Buffer
from potluck.link.channel.packet import Urgency
from potluck.link.dispatch import Answer, Arrived, Incoming
from potluck.link.envelope import (
    MAX_REASON_CHARACTERS,
    MAX_SECONDS,
    Envelope,
    MessageRole,
    Post,
    as_views,
    encode_message,
    tag_of,
)
from potluck.messages import Message, decode

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

# Errors that keep their kind on the way to the asker, the more special first.
_TOLD: tuple[type[PotluckError], ...] = (
    PermissionDeniedError,
    RevisionConflictError,
    DeadlineExceededError,
    RetryableError,
    ConfigurationError,
    ProtocolError,
    PeerError,
)


class Requests:
    """The questions that this peer has asked and that are not answered yet."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._next_number = 1
        self._pending: dict[tuple[str, int], asyncio.Future[Arrived]] = {}

    async def ask(
        self,
        peer: str,
        message: Message,
        frames: Sequence[Buffer],
        *,
        reply: type[M],
        timeout_seconds: float,
        urgency: Urgency,
        group: str = "",
    ) -> Incoming[M]:
        """Send a request and return its answer."""
        tag, body = encode_message(message, group)
        wanted = tag_of(reply)
        number, self._next_number = self._next_number, self._next_number + 1
        envelope = Envelope(
            role=MessageRole.REQUEST,
            kind=tag,
            number=number,
            body=body,
            seconds=min(max(timeout_seconds, 0.0), MAX_SECONDS),
        )
        answer = asyncio.get_running_loop().create_future()
        self._pending[peer, number] = answer
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._post(peer, envelope, as_views(frames), urgency=urgency, timeout_seconds=timeout_seconds)
                arrived: Arrived = await answer
        except TimeoutError:
            raise DeadlineExceededError(
                f"peer {peer} did not answer {tag} within {timeout_seconds:g} s: ask again, or ask another"
            ) from None
        finally:
            del self._pending[peer, number]
            answer.cancel()
        if arrived.envelope.role == MessageRole.FAILURE:
            raise _told_error(peer, tag, arrived.envelope)
        if arrived.envelope.kind != wanted:
            raise ProtocolError(f"peer {peer} answered {tag} with {arrived.envelope.kind[:100]!r}, not {wanted!r}")
        return Incoming(peer, decode(reply, arrived.envelope.body), arrived.frames)

    def take(self, arrived: Arrived) -> None:
        """A reply or a failure has come. It belongs to the asker from now on, so its credit goes back."""
        arrived.release()
        answer = self._pending.get((arrived.sender, arrived.envelope.number))
        if answer is not None and not answer.done():
            answer.set_result(arrived)

    def fail(self, peer: str, error: PeerUnreachableError) -> None:
        """The peer's channel is gone: nothing asked over it will be answered."""
        for (asked, _), answer in self._pending.items():
            if asked == peer and not answer.done():
                answer.set_exception(error)

    async def respond(self, peer: str, asked: Envelope, urgency: Urgency, answer: Answer | Exception) -> None:
        """Send the answer, or what can be told of the error. An asker that is gone needs none."""
        seconds = asked.seconds
        with contextlib.suppress(PeerUnreachableError, DeadlineExceededError):  # nobody waits any more
            try:
                envelope, frames = _reply(asked.number, answer)
                await self._post(peer, envelope, frames, urgency=urgency, timeout_seconds=seconds)
            except ConfigurationError:  # the answer exceeds a limit, or is none
                logger.exception("the answer to %s from %s cannot be sent", asked.kind, peer)
                failure = _failure(asked.number, PeerError("its handler gave an answer that cannot be sent"))
                await self._post(peer, failure, [], urgency=urgency, timeout_seconds=seconds)


def _reply(number: int, answer: Answer | Exception) -> tuple[Envelope, list[memoryview]]:
    if isinstance(answer, Exception):
        return _failure(number, answer), []
    if answer is None:
        return _failure(number, PeerError("its handler gave no answer")), []
    message, frames = answer if isinstance(answer, tuple) else (answer, ())
    tag, body = encode_message(message)
    return Envelope(role=MessageRole.REPLY, kind=tag, number=number, body=body), as_views(frames)


def _failure(number: int, error: Exception) -> Envelope:
    for told in _TOLD:
        if isinstance(error, told):
            text = str(error)[:MAX_REASON_CHARACTERS]
            return Envelope(role=MessageRole.FAILURE, kind=told.__name__, number=number, text=text)
    return Envelope(role=MessageRole.FAILURE, kind=PeerError.__name__, number=number, text="its handler failed")


def _told_error(peer: str, tag: str, envelope: Envelope) -> PotluckError:
    for told in _TOLD:
        if told.__name__ == envelope.kind:
            return told(f"peer {peer} could not answer {tag}: {envelope.text[:MAX_REASON_CHARACTERS]}")
    return PeerError(f"peer {peer} could not answer {tag}")
