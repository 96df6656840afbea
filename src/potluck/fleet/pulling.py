"""Asking the hub for items of a queue.

JetStream sends an item under the subject on which it was put, so its subject does not tell which question it answers.
One subscription takes all items, one question is asked at a time, and an item that comes after its question has ended
waits for the next one.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque

import msgspec

from potluck.errors import HubUnavailableError
from potluck.fleet.member import NOT_FOUND, FleetMember, Listening
from potluck.hub.connection import Delivery
from potluck.hub.nats.subscription import NatsDelivery
from potluck.hub.subjects import Subjects

PULL_BYTES = 16 * 1024 * 1024  # in one answer; several items of the largest size fit
WAIT_SECONDS = 20.0  # one question may wait so long
ANSWER_SECONDS = 10.0
OVER = (NOT_FOUND, "408", "409")  # nothing there; its time is over; no more bytes, or the hub stops


class Puller:
    """The items of one queue, as they come. Made by `open`."""

    def __init__(self, member: FleetMember, name: str) -> None:
        self._member = member
        self._name = name
        self._inbox = f"{Subjects.inbox(member.peer)}.take-{secrets.token_hex(8)}"
        self._asking = asyncio.Lock()
        self._came: deque[NatsDelivery] = deque()
        self._status = ""
        self._news = asyncio.Event()
        self._listening: Listening | None = None

    @classmethod
    async def open(cls, member: FleetMember, name: str) -> Puller:
        """Begin to listen."""
        puller = cls(member, name)
        puller._listening = await member.listen(puller._inbox, puller._take_in, puller._came_back)
        return puller

    async def pull(self, max_items: int, wait_seconds: float) -> list[NatsDelivery]:
        """Up to so many items; waits for the first one, if there is none yet."""
        async with self._asking:
            if not self._came:
                await self._ask({"batch": max_items, "no_wait": True, "max_bytes": PULL_BYTES}, max_items, 0.0)
            if not self._came and wait_seconds > 0:
                seconds = min(wait_seconds, WAIT_SECONDS)
                await self._ask({"batch": 1, "expires": int(seconds * 1e9)}, 1, seconds)
            return [self._came.popleft() for _ in range(min(max_items, len(self._came)))]

    async def close(self) -> None:
        """Listen no more. Idempotent."""
        if self._listening is not None:
            await self._listening.cancel()

    async def _ask(self, wanted: dict[str, object], max_items: int, wait_seconds: float) -> None:
        self._status = ""
        subject = self._member.subjects.next(self._name)
        await self._member.hub.forward(subject, msgspec.json.encode(wanted), reply=self._inbox)
        try:
            async with asyncio.timeout(wait_seconds + ANSWER_SECONDS):
                while not self._status and len(self._came) < max_items:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            if not self._came:
                raise HubUnavailableError(f"the hub did not say what is in {self._name}") from None
        if self._status and self._status not in OVER:
            raise HubUnavailableError(f"the hub hands out nothing of {self._name} now (status {self._status})")

    def _take_in(self, delivery: Delivery) -> None:
        assert isinstance(delivery, NatsDelivery)
        status = delivery.headers.get("Status", "")
        if status:
            self._status = status
        else:
            self._came.append(delivery)
        self._news.set()

    def _came_back(self) -> None:
        """What was asked on a connection that is gone is not answered any more."""
        self._status = "408"
        self._news.set()
