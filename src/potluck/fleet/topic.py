"""A topic: what was published last, for everybody who follows.

The newest item of each publisher is kept. A follower gets the newest there is, then each new one; a slow follower skips
what is out of date. The parts of a large item stay until the next one is whole.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from typing import Any, Generic, TypeVar

from potluck.errors import ProtocolError, RetryableError
from potluck.fleet.items import decode_item, encode_item
from potluck.fleet.largeitems import WHOLE_BYTES, fetch_parts, is_head, put_parts
from potluck.fleet.member import FleetMember
from potluck.hub.access.queueing import ForgetParts, Purged
from potluck.hub.connection import Delivery
from potluck.hub.queues import sender_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

NO_SLOT = "none"
TORN_RETRIES = 5  # a large item may be replaced twice while it is read
RETRY_SECONDS = 0.5


class Version(Generic[T]):
    """One published item."""

    def __init__(self, number: int, value: T, publisher: str) -> None:
        self.number = number
        """Grows with each item published on the topic."""
        self.value = value
        self.publisher = publisher
        """The peer that published it."""

    def __repr__(self) -> str:
        return f"Version(number={self.number})"


class Topic(Generic[T]):
    """One topic, in one member's name. Made by `AsyncFleet.topic`."""

    def __init__(self, member: FleetMember, name: str, kind: type[T] | Any = Any) -> None:
        self.name = name
        self._member = member
        self._kind = kind
        self._publishing = asyncio.Lock()
        self._had_parts = True  # as far as we know: one before us may have died halfway

    async def publish(self, value: T) -> int:
        """Publish; returns the version's number when it is on the hub's disk."""
        await self._member.definition(self.name, "topic", "put")
        data, member = encode_item(value), self._member
        async with self._publishing:
            slot = ""
            if len(data) > WHOLE_BYTES:
                slot = secrets.token_hex(12)
                data = await put_parts(member, self.name, slot, data)
            written = await member.write(self.name, member.subjects.put(self.name, member.peer), data)
            await self._forget_older(slot)
            return written.seq

    async def _forget_older(self, slot: str) -> None:
        """Have the hub drop the parts of earlier versions, those of a publisher that died halfway too."""
        if not slot and not self._had_parts:
            return
        self._had_parts = bool(slot)
        keep = ForgetParts(name=self.name, putter=self._member.peer, item=slot or NO_SLOT, others=True)
        try:
            await self._member.ask("forget", keep, Purged)
        except RetryableError as error:  # the next version tries again
            logger.info("parts of earlier versions of %s are still at the hub: %s", self.name, error)

    async def latest(self) -> Version[T] | None:
        """The newest item of all; None when nothing was published yet."""
        await self._member.definition(self.name, "topic", "take")
        for attempt in range(TORN_RETRIES):
            messages = await self._member.read(
                self.name, "", {"multi_last": [self._member.subjects.put(self.name, "*")]}
            )
            if not messages:
                return None
            newest = max(messages, key=lambda message: int((message.headers or {}).get("Nats-Sequence", 0)))
            headers = newest.headers or {}
            publisher = sender_of(headers.get("Nats-Subject", ""))
            try:
                data = newest.data
                whole = await fetch_parts(self._member, self.name, publisher, data) if is_head(data) else data
                return Version(int(headers.get("Nats-Sequence", 0)), decode_item(whole, self._kind), publisher)
            except ProtocolError:  # replaced while it was read, or never whole
                if attempt == TORN_RETRIES - 1:
                    raise
        raise AssertionError("every attempt returns or raises")

    async def follow(self) -> AsyncIterator[Version[T]]:
        """The newest item, if there is one, and then each new one, the newest only where several have come."""
        await self._member.definition(self.name, "topic", "take")
        told = asyncio.Event()
        told.set()

        def news(_delivery: Delivery) -> None:
            told.set()

        listening = await self._member.listen(self._member.subjects.news(self.name, "*"), news, told.set)
        last = 0
        try:
            while True:
                await told.wait()
                told.clear()
                try:
                    version = await self.latest()
                except RetryableError:
                    await asyncio.sleep(RETRY_SECONDS)
                    told.set()
                    continue
                if version is not None and version.number > last:
                    last = version.number
                    yield version
        finally:
            await listening.cancel()
