"""Requests that wait for their answers: one reply subject for all of them, told apart by the last token."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nats.aio.msg import Msg

from potluck.errors import HubUnavailableError, NobodyAnswersError, PermissionDeniedError, PotluckError

NO_RESPONDERS = "503"


def status_of(message: Msg) -> str:
    """The status that the hub itself answers with, as in 404; empty for an ordinary message."""
    return (message.headers or {}).get("Status", "")


class _Waiting:
    """One request."""

    __slots__ = ("answers", "done", "folded_subject", "is_last", "subject")

    def __init__(self, subject: str, is_last: Callable[[Msg], bool]) -> None:
        self.subject = subject
        self.folded_subject = subject.lower()  # the hub's complaints come to us in lower case
        self.is_last = is_last
        self.answers: list[Msg] = []
        self.done: asyncio.Future[list[Msg]] = asyncio.get_running_loop().create_future()

    def take(self, message: Msg) -> None:
        self.answers.append(message)
        if self.done.done():
            return
        if status_of(message) == NO_RESPONDERS:
            self.fail(NobodyAnswersError(f"nobody answers on {self.subject}: nothing is there that should"))
        elif self.is_last(message):
            self.done.set_result(self.answers)

    def fail(self, error: PotluckError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class PendingRequests:
    """The requests of one connection that are not answered yet."""

    def __init__(self, inbox_prefix: str) -> None:
        self._prefix = f"{inbox_prefix}.{secrets.token_hex(8)}"
        self._counter = itertools.count()
        self._waiting: dict[str, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def subject(self) -> str:
        """Where all the answers come in."""
        return f"{self._prefix}.*"

    def resolve(self, message: Msg) -> None:
        """Take in an answer; one that comes too late is dropped."""
        waiting = self._waiting.get(message.subject.rpartition(".")[2])
        if waiting is not None:
            waiting.take(message)

    def deny(self, folded_subject: str) -> bool:
        """Fail the requests on a subject that the hub says we may not use; whether there were any."""
        denied = [waiting for waiting in self._waiting.values() if waiting.folded_subject == folded_subject]
        for waiting in denied:
            waiting.fail(PermissionDeniedError(f"this member may not publish on {waiting.subject}"))
        return bool(denied)

    def fail_all(self, reason: str) -> None:
        """The connection is gone: no answer will come."""
        for waiting in self._waiting.values():
            waiting.fail(
                HubUnavailableError(f"no answer on {waiting.subject}: {reason}; whether it was acted on is not known")
            )

    @contextlib.contextmanager
    def open(self, subject: str, is_last: Callable[[Msg], bool]) -> Iterator[OpenRequest]:
        """Begin a request, which is forgotten at the end of the `with`."""
        token = str(next(self._counter))
        waiting = self._waiting[token] = _Waiting(subject, is_last)
        try:
            yield OpenRequest(f"{self._prefix}.{token}", waiting.done)
        finally:
            del self._waiting[token]
            if waiting.done.done() and not waiting.done.cancelled():
                waiting.done.exception()  # looked at: it may have failed while its request was still being sent


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """One request under way."""

    reply: str
    """Where its answers go."""

    answers: asyncio.Future[list[Msg]]
    """All the answers, or what went wrong."""
