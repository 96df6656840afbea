"""A queue: items go in by `put`, and each goes to one taker, who says `done` or `again`.

What `put` returned for is on the hub's disk. Delivery is at least once; `done` writes the item's id down before it
returns, and takers look there before they hand an item out. So no item comes back after `done`, also where the hub died
before it had taken the item out. The acknowledgement itself need not be confirmed for that.

A taker holds an item for as long as its process lives and the item is in use: it tells the hub so three times in each
lease. When it dies, the item goes to another taker after the lease.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import weakref
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import msgspec

from potluck import tasks
from potluck.errors import HubUnavailableError, PotluckError, ProtocolError, QueueFullError, RetryableError
from potluck.fleet.items import decode_item, encode_item
from potluck.fleet.largeitems import WHOLE_BYTES, fetch_parts, is_head, put_parts, read_head
from potluck.fleet.member import FleetMember
from potluck.fleet.pulling import FRESH_HEADER, Puller, tries_and_number
from potluck.hub.access.queueing import ForgetParts, Purged, PurgeQueue
from potluck.hub.queues import QueueDefinition, check_item_id, sender_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_TAKEN = 256  # in one answer
LETTERS_AT_ONCE = 256
PEEK_BYTES = 8 * 1024 * 1024  # in one answer
LEASES_TOLD = 3  # times in each lease
ROOM_SECONDS = 0.1  # pause before a blocked putter tries again; doubles
LONGEST_ROOM_SECONDS = 1.0
ID_HEADER = "Nats-Msg-Id"
PUT_AT_HEADER = "Nats-Time-Stamp"


class Item(Generic[T]):
    """Something taken from a queue."""

    def __init__(
        self,
        queue: Queue[T],
        *,
        item_id: str,
        value: T,
        putter: str,
        tries: int,
        reply: str,
        data: bytes,
    ) -> None:
        self.id = item_id
        """As the putter named it."""
        self.value = value
        """What was put."""
        self.putter = putter
        """The peer that put it."""
        self.tries = tries
        """How often it has been handed out, this time included."""
        self.number = 0
        """Its place among what was looked at; 0 for one that was taken."""
        self._queue = queue
        self._reply = reply
        self._data = data
        self._is_over = False

    async def done(self) -> None:
        """It is done: once this has returned, it never comes back."""
        if not self._is_over:
            await self._queue._done(self)

    async def again(self, after_seconds: float = 0.0) -> None:
        """Give it back: it is handed out again after that time."""
        if not self._is_over:
            await self._queue._again(self, after_seconds)

    def __repr__(self) -> str:
        return f"Item(id={self.id!r}, tries={self.tries})"


class Queue(Generic[T]):
    """One queue, in one member's name. Made by `AsyncFleet.queue`."""

    def __init__(self, member: FleetMember, name: str, kind: type[T] | Any = Any) -> None:
        self.name = name
        self._member = member
        self._kind = kind
        self._held: weakref.WeakSet[Item[T]] = weakref.WeakSet()
        self._puller: Puller | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[None]] = set()
        self._buffered_bytes = 0
        self._unsent: list[str] = []
        self.counts: dict[str, int] = dict.fromkeys(
            ("put", "duplicates", "taken", "done", "again", "dead", "already_done", "looked_up", "unreadable"), 0
        )

    async def put(self, value: T, *, id: str = "", timeout_seconds: float | None = None) -> bool:  # noqa: A002
        """Put an item; returns when it is on the hub's disk. False when an item with this id was put before.

        Where the queue is full and its owner wants putters to wait, waits up to `timeout_seconds` for room (for ever,
        unless given); else QueueFullError.
        """
        definition = await self._member.definition(self.name, "queue", "put")
        return await self._put(definition, encode_item(value), id, timeout_seconds)

    async def send(self, value: T, *, id: str = "") -> None:  # noqa: A002
        """Put an item in the background. QueueFullError when too much waits already: the hub may be away.

        `flush` waits until all of it is on the hub's disk.
        """
        definition = await self._member.definition(self.name, "queue", "put")
        data = encode_item(value)
        if self._buffered_bytes + len(data) > self._member.config.buffer_bytes:
            raise QueueFullError(
                f"{self._buffered_bytes:,} bytes wait for {self.name} already, of {self._member.config.buffer_bytes:,} "
                "that may: the hub is away or slow; wait, or drop this item"
            )
        self._buffered_bytes += len(data)
        task = asyncio.create_task(self._put_later(definition, data, id), name=f"put into {self.name}")
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def flush(self, timeout_seconds: float | None = None) -> None:
        """Wait until all that was sent is on the hub's disk. HubUnavailableError names how much is not."""
        pending = set(self._sending)
        if pending:
            await asyncio.wait(pending, timeout=timeout_seconds)
        unsent, self._unsent = self._unsent, []
        if left := sum(not task.done() for task in pending) + len(unsent):
            raise HubUnavailableError(f"{left} items sent to {self.name} did not reach the hub")

    async def take(self, max_items: int = 1, wait_seconds: float = 0.0) -> list[Item[T]]:
        """Take up to so many items; waits up to `wait_seconds` for the first one, and not for more."""
        definition = await self._member.definition(self.name, "queue", "take")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_seconds
        while True:
            left_seconds = deadline - loop.time()
            try:
                items = await self._take(definition, max_items, max(left_seconds, 0.0))
            except RetryableError as error:  # the hub is away: an item may still come in time
                if deadline - loop.time() <= 0:
                    raise
                logger.info("nothing can be taken from %s now, trying again: %s", self.name, error)
                await asyncio.sleep(min(ROOM_SECONDS, max(deadline - loop.time(), 0.0)))
                continue
            if items or deadline - loop.time() <= 0:
                return items

    async def peek(self, max_items: int = 10, *, dead: bool = False) -> list[Item[T]]:
        """Look at the oldest items, or at dead letters, without taking them."""
        await self._member.definition(self.name, "queue", "take")
        return (await self._peek(max_items, dead=dead))[0]

    async def retry_dead(self) -> int:
        """Put all dead letters back into the queue, the oldest first; returns how many there were.

        A letter is removed once it is in the queue. Broken off and called again, it puts none twice.
        """
        number = 0
        while True:
            letters, newest = await self._peek(LETTERS_AT_ONCE, dead=True)
            if not newest:
                return number
            for letter in letters:
                await self.put(letter.value, id=f"{letter.id}-again-{letter.number}")
            await self._member.ask("purge", PurgeQueue(name=self.name, dead=True, up_to=newest), Purged)
            for letter in letters:
                await self._forget_parts(letter)
            number += len(letters)

    async def close(self) -> None:
        """Give back what is held, and send what waits. Idempotent."""
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            await tasks.end(keeping)
        for item in list(self._held):
            try:
                await item.again()
            except PotluckError as error:  # the lease gives it back as well
                logger.info("an item of %s was not given back: %s", self.name, error)
        if self._puller is not None:
            await self._puller.close()
        await tasks.end(*self._sending)

    async def _peek(self, max_items: int, *, dead: bool) -> tuple[list[Item[T]], int]:
        """The oldest items, at least one if there is any, and the number of the last; 0 when there is none."""
        wanted = {"seq": 1, "batch": max_items, "next_by_subj": ">", "max_bytes": PEEK_BYTES}
        shown: list[Item[T]] = []
        newest = 0
        for message in await self._member.read(self.name, "dead" if dead else "", wanted, most_bytes=PEEK_BYTES):
            headers = message.headers or {}
            newest = int(headers.get("Nats-Sequence", 0))
            putter = headers.get("Putter", "") or sender_of(headers.get("Nats-Subject", ""))
            item = await self._read(message.data, headers, putter, tries=0, reply="")
            if item is not None:
                item.number = newest
                shown.append(item)
        return shown, newest

    # Putting

    async def _put(self, definition: QueueDefinition, data: bytes, name: str, timeout_seconds: float | None) -> bool:
        item_id, is_fresh = name or secrets.token_hex(12), not name
        loop = asyncio.get_running_loop()
        deadline = None if timeout_seconds is None else loop.time() + timeout_seconds
        pause_seconds = ROOM_SECONDS
        while True:
            try:
                return await self._put_now(data, item_id, is_fresh)
            except QueueFullError:
                out_of_time = deadline is not None and loop.time() + pause_seconds > deadline
                if definition.when_full != "block" or out_of_time:
                    raise
            is_fresh = False
            await asyncio.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, LONGEST_ROOM_SECONDS)

    async def _put_now(self, data: bytes, item_id: str, is_fresh: bool) -> bool:
        member = self._member
        if len(data) > WHOLE_BYTES:
            data = await put_parts(member, self.name, check_item_id(item_id), data)
        headers = {ID_HEADER: item_id}
        written = await member.write(
            self.name,
            member.subjects.put(self.name, member.peer),
            data,
            headers=headers,
            first_headers=headers | {FRESH_HEADER: "1"} if is_fresh else None,
        )
        self.counts["duplicates" if written.duplicate else "put"] += 1
        return not written.duplicate

    async def _put_later(self, definition: QueueDefinition, data: bytes, name: str) -> None:
        try:
            await self._put(definition, data, name, None)
        except PotluckError as error:
            self._unsent.append(name)
            logger.warning("an item sent to %s was lost: %s", self.name, error)
        finally:
            self._buffered_bytes -= len(data)

    # Taking

    async def _take(self, definition: QueueDefinition, max_items: int, wait_seconds: float) -> list[Item[T]]:
        if self._puller is None:
            self._puller = await Puller.open(self._member, self.name)
        messages = await self._puller.pull(min(max_items, MOST_TAKEN), wait_seconds, definition.lease_seconds)
        subjects = [
            self._member.subjects.done(self.name, check_item_id(message.headers.get(ID_HEADER, "") or "-"))
            for message in messages
        ]
        doubtful = [
            subject
            for message, subject in zip(messages, subjects, strict=True)
            if self._puller.may_be_done(message, definition.lease_seconds)
        ]
        self.counts["looked_up"] += len(doubtful)
        already = await self._member.read_last(self.name, "done", list(dict.fromkeys(doubtful))) if doubtful else {}
        items: list[Item[T]] = []
        for message, subject in zip(messages, subjects, strict=True):
            if subject in already:
                self.counts["already_done"] += 1
                await self._member.hub.publish(message.reply, b"+ACK")
                continue
            item = await self._read(
                message.payload,
                message.headers,
                sender_of(message.subject),
                tries_and_number(message.reply)[0],
                message.reply,
            )
            if item is None:
                await self._member.hub.publish(message.reply, b"+TERM")
            elif item.tries > definition.tries:
                await self._bury(item)
            else:
                items.append(item)
        self.counts["taken"] += len(items)
        self._held.update(items)
        if items and self._keeping is None:
            every_seconds = definition.lease_seconds / LEASES_TOLD
            self._keeping = asyncio.create_task(self._keep(every_seconds), name=f"leases of {self.name}")
        return items

    async def _read(
        self, data: bytes, headers: Mapping[str, str], putter: str, tries: int, reply: str
    ) -> Item[T] | None:
        """The item in a message; None, counted and logged, when nobody could have put it so."""
        try:
            whole = await fetch_parts(self._member, self.name, putter, data) if is_head(data) else data
            value: T = decode_item(whole, self._kind)
        except ProtocolError as error:
            self.counts["unreadable"] += 1
            logger.warning("something in %s from %s is thrown away: %s", self.name, putter or "nobody", error)
            return None
        return Item(
            self, item_id=headers.get(ID_HEADER, ""), value=value, putter=putter, tries=tries, reply=reply, data=data,
        )  # fmt: skip

    async def _done(self, item: Item[T]) -> None:
        record = msgspec.json.encode({"by": self._member.peer})
        await self._member.write(
            self.name, self._member.subjects.done(self.name, check_item_id(item.id or "-")), record
        )
        self._over(item)
        self.counts["done"] += 1
        try:
            await self._member.hub.publish(item._reply, b"+ACK")
            await self._forget_parts(item)
        except RetryableError as error:  # it is recorded as done; the next taker drops it
            logger.debug("an item of %s that is done was not taken out yet: %s", self.name, error)

    async def _forget_parts(self, item: Item[T]) -> None:
        if is_head(item._data):
            head = read_head(item._data)
            await self._member.ask("forget", ForgetParts(name=self.name, putter=item.putter, item=head.slot), Purged)

    async def _again(self, item: Item[T], after_seconds: float) -> None:
        delay = msgspec.json.encode({"delay": int(after_seconds * 1e9)}) if after_seconds > 0 else b""
        await self._member.hub.publish(item._reply, b"-NAK " + delay)
        self._over(item)
        self.counts["again"] += 1

    async def _bury(self, item: Item[T]) -> None:
        """Move an item that failed too often to the dead letters."""
        headers = {ID_HEADER: item.id, "Putter": item.putter}
        subject = self._member.subjects.dead(self.name, self._member.peer)
        await self._member.write(self.name, subject, item._data, headers=headers)
        await self._member.hub.publish(item._reply, b"+ACK")
        item._is_over = True
        self.counts["dead"] += 1
        logger.warning(
            "%r of %s was handed out %d times in vain: see `potluck queue dead`", item.id, self.name, item.tries - 1
        )

    def _over(self, item: Item[T]) -> None:
        item._is_over = True
        self._held.discard(item)

    async def _keep(self, every_seconds: float) -> None:
        """Tell the hub that what is held is still in work."""
        while True:
            await asyncio.sleep(every_seconds)
            try:
                for item in list(self._held):
                    await self._member.hub.publish(item._reply, b"+WPI")
            except RetryableError as error:
                logger.debug("leases of %s could not be told: %s", self.name, error)
