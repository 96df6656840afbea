"""Items that are larger than a message: in parts, with a hash of the whole.

The parts are put first, then a head that names them. So a taker that sees the head can fetch the whole item. A putter
that dies halfway leaves no half item behind, only parts that expire.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import TYPE_CHECKING

import msgspec

from potluck.errors import ConfigurationError, ProtocolError
from potluck.hub.queues import MAX_ITEM_BYTES
from potluck.messages import Message

if TYPE_CHECKING:
    from potluck.fleet.member import FleetMember

PART_BYTES = 1024 * 1024
WHOLE_BYTES = PART_BYTES + 32 * 1024  # an item up to this goes as one message: 1 MiB of numbers and what describes them
WINDOW = 8  # parts on their way at a time
FETCH_PARTS = 8  # parts asked for at a time on a fast line
FETCH_SECONDS = 5.0  # the hub cuts off who takes 30 s for what it was sent at once
MAGIC = b"PL\x01\x00"


class PartsHead(Message, frozen=True, kw_only=True):
    """What stands in the queue in a large item's place."""

    slot: str  # names the parts: the item's id, or a topic's slot
    num_parts: int
    num_bytes: int
    sha256: str


def is_head(data: bytes) -> bool:
    """Whether these bytes stand for a large item."""
    return data[: len(MAGIC)] == MAGIC


async def put_parts(member: FleetMember, name: str, slot: str, data: bytes) -> bytes:
    """Put the parts of an item; returns its head."""
    if len(data) > MAX_ITEM_BYTES:
        raise ConfigurationError(f"an item of {len(data):,} bytes is too large: at most {MAX_ITEM_BYTES:,} are allowed")
    view = memoryview(data)
    starts = range(0, len(data), PART_BYTES)
    window = asyncio.Semaphore(WINDOW)

    async def put(number: int, start: int) -> None:
        async with window:
            subject = member.subjects.part(name, member.peer, slot, number)
            await member.write(name, subject, bytes(view[start : start + PART_BYTES]))

    async with asyncio.TaskGroup() as group:
        for number, start in enumerate(starts):
            group.create_task(put(number, start))
    sha256 = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
    head = PartsHead(slot=slot, num_parts=len(starts), num_bytes=len(data), sha256=sha256)
    return MAGIC + msgspec.msgpack.encode(head)


async def fetch_parts(member: FleetMember, name: str, putter: str, data: bytes) -> bytearray:
    """The item that a head stands for; ProtocolError when its parts are gone or are not what the head says."""
    head = read_head(data)
    whole = bytearray(head.num_bytes)
    filled = first = 0
    at_once = 1
    while first < head.num_parts:
        numbers = range(first, min(first + at_once, head.num_parts))
        subjects = [member.subjects.part(name, putter, head.slot, number) for number in numbers]
        began = time.monotonic()
        found = await member.read_last(name, "part", subjects, len(subjects) * PART_BYTES)
        fitting = int(len(subjects) * FETCH_SECONDS / max(time.monotonic() - began, 1e-3))
        first, at_once = numbers.stop, max(min(2 * at_once, fitting, FETCH_PARTS), 1)
        for subject in subjects:
            part = found.get(subject)
            if part is None or filled + len(part) > head.num_bytes:
                raise ProtocolError(f"parts of a large item of {name} are gone or do not fit")
            whole[filled : filled + len(part)] = part
            filled += len(part)
    if filled != head.num_bytes or await asyncio.to_thread(lambda: hashlib.sha256(whole).hexdigest()) != head.sha256:
        raise ProtocolError(f"the parts of a large item of {name} are not what its putter put")
    return whole


def read_head(data: bytes) -> PartsHead:
    """The head, checked."""
    try:
        head = msgspec.msgpack.decode(memoryview(data)[len(MAGIC) :], type=PartsHead)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the head of a large item cannot be read: {error}") from error
    if not 0 < head.num_bytes <= MAX_ITEM_BYTES or head.num_parts != -(-head.num_bytes // PART_BYTES):
        raise ProtocolError(f"a large item of {head.num_bytes} bytes in {head.num_parts} parts makes no sense")
    return head
