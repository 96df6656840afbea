"""What a sender holds until its message has arrived."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from potluck.errors import DeadlineExceededError


def _has_left(_error: Exception) -> bool:
    return False


class SendReceipt:
    """One message on its way: settled when the peer has it, or when it is certain that nobody will know.

    Until then the frames belong to the link: their owner must not change them.
    """

    __slots__ = ("_error", "_settled", "_watchers", "withdraw")

    def __init__(self) -> None:
        self._settled = False
        self._error: Exception | None = None
        self._watchers: list[Callable[[], None]] | None = None
        self.withdraw: Callable[[Exception], bool] = _has_left
        """Settles the message with this error if nothing of it has left; whether that is so. Its queue sets this."""

    @property
    def settled(self) -> bool:
        """Whether the message has arrived or failed."""
        return self._settled

    @property
    def acknowledged(self) -> bool:
        """Whether the peer has the message."""
        return self._settled and self._error is None

    @property
    def error(self) -> Exception | None:
        """Why the message failed: the peer may or may not have got it."""
        return self._error

    def settle(self, error: Exception | None = None) -> None:
        """Say what became of the message; only the first word counts."""
        if self._settled:
            return
        self._settled = True
        self._error = error
        self.withdraw = _has_left  # the queue's own holds on to the frames
        watchers, self._watchers = self._watchers, None
        for watcher in watchers or ():
            watcher()

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call `watcher` once the message is settled; at once if it is."""
        if self._settled:
            watcher()
        elif self._watchers is None:
            self._watchers = [watcher]
        else:
            self._watchers.append(watcher)

    async def wait(self, *, timeout_seconds: float) -> None:
        """Return once the peer has the message. PeerUnreachableError when it failed, DeadlineExceededError too late."""
        if not self._settled:
            arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.watch(lambda: None if arrived.done() else arrived.set_result(None))
            try:
                async with asyncio.timeout(timeout_seconds):
                    await arrived
            except TimeoutError:
                raise DeadlineExceededError(
                    f"a message was not acknowledged within {timeout_seconds:g} s: it may still arrive"
                ) from None
        if self._error is not None:
            raise self._error
