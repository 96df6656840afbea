"""Asking the hub for items of a queue.

JetStream sends an item under the subject on which it was put, so its subject does not tell which question it answers.
One subscription takes all items, one question is asked at a time, and an item that comes after its question has ended
waits for the next one.

Whether an item is done already has to be looked up, unless it cannot be. It cannot be where its putter put it once and
under no name (so it has been put only now), the hub hands it out for the first time, has not been started again since
it was put (or it would not remember), and has handed it out just now (or it may be with another taker meanwhile).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque

import msgspec

from potluck.errors import HubUnavailableError
from potluck.fleet.member import NOT_FOUND, FleetMember, Listening
from potluck.hub.connection import Delivery
from potluck.hub.nats.subscription import NatsDelivery
from potluck.hub.queues import UNKNOWN
from potluck.hub.subjects import Subjects

PULL_BYTES = 16 * 1024 * 1024  # in one answer, on a fast line
FIRST_PULL_BYTES = 2 * 1024 * 1024
LEAST_PULL_BYTES = 1280 * 1024  # an item of the largest size fits
LEASE_SHARE = 0.25  # an answer takes no longer than this share of a lease: after it, items go to other takers
MEASURED_BYTES = 128 * 1024  # less says nothing about a line
WAIT_SECONDS = 20.0  # one question may wait so long
ANSWER_SECONDS = 10.0
FRESH_HEADER = "Potluck-Fresh"  # the putter has not put this id before
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
        self._asked_at = 0.0
        self._pull_bytes = FIRST_PULL_BYTES
        self._first_at = self._last_at = 0.0  # when the first and the last item of an answer came
        self._num_bytes = 0  # of those after the first
        self._newest: int | None = None  # the newest item when this connection began; None: not asked yet

    @classmethod
    async def open(cls, member: FleetMember, name: str) -> Puller:
        """Begin to listen."""
        puller = cls(member, name)
        puller._listening = await member.listen(puller._inbox, puller._take_in, puller._came_back)
        return puller

    async def pull(self, max_items: int, wait_seconds: float, lease_seconds: float) -> list[NatsDelivery]:
        """Up to so many items; waits for the first one, if there is none yet."""
        async with self._asking:
            if self._newest is None:
                await self._begin()
            if not self._came:
                # With both, the hub waits for the first item and then sends what there is.
                seconds = min(wait_seconds, WAIT_SECONDS)
                wanted: dict[str, object] = {"batch": max_items, "no_wait": True, "max_bytes": self._pull_bytes}
                await self._ask(wanted | ({"expires": int(seconds * 1e9)} if seconds > 0 else {}), max_items, seconds)
                self._measure(lease_seconds)
            return [self._came.popleft() for _ in range(min(max_items, len(self._came)))]

    def may_be_done(self, message: NatsDelivery, lease_seconds: float) -> bool:
        """Whether a message that was pulled may be an item that is done already."""
        tries, number = tries_and_number(message.reply)
        is_certain = self._newest is not None and self._newest != UNKNOWN and number > self._newest
        is_fresh = FRESH_HEADER in message.headers and tries == 1
        return not (is_certain and is_fresh and _now() - self._asked_at < lease_seconds / 2)

    async def close(self) -> None:
        """Listen no more. Idempotent."""
        if self._listening is not None:
            await self._listening.cancel()

    async def _begin(self) -> None:
        """Learn which items were put before this connection; if it breaks meanwhile, that is asked again."""
        self._newest = UNKNOWN
        for depth in await self._member.list_queues():
            if depth.definition.name == self._name and self._newest is not None:
                self._newest = depth.newest

    async def _ask(self, wanted: dict[str, object], max_items: int, wait_seconds: float) -> None:
        self._status = ""
        self._num_bytes, self._first_at = 0, 0.0
        self._asked_at = _now()
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
            self._last_at = _now()
            if self._first_at:
                self._num_bytes += len(delivery.payload)
            else:
                self._first_at = self._last_at
        self._news.set()

    def _measure(self, lease_seconds: float) -> None:
        """Ask next time for as much as this line brings in a share of the lease."""
        if self._num_bytes >= MEASURED_BYTES:
            rate = self._num_bytes / max(self._last_at - self._first_at, 1e-3)
            fitting = int(rate * lease_seconds * LEASE_SHARE)
            self._pull_bytes = min(max(fitting, LEAST_PULL_BYTES), PULL_BYTES)

    def _came_back(self) -> None:
        """What was asked on a connection that is gone is not answered any more."""
        self._status = "408"
        self._newest = None
        self._news.set()


def tries_and_number(reply: str) -> tuple[int, int]:
    """How often a message was handed out, and its number: $JS.ACK.STREAM.CONSUMER.TRIES.NUMBER.…"""
    tokens = reply.split(".")
    if len(tokens) < 9 or not (tokens[4].isdigit() and tokens[5].isdigit()):
        return 1, 0
    return int(tokens[4]), int(tokens[5])


def _now() -> float:
    """Seconds that go on while the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
